"""Ids and words that outputs may not have, through the engine: n, preemption, drafts; and limits."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.checks import check_params, check_prompt
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from tests.engine.test_engine_oracle import ROOMY, make_engine
from tests.oracle.checkpoints import Shape, make_checkpoint

VOCAB = 31
PROMPT = (3, 4, 5, 4, 5)
TIGHT = dataclasses.replace(
    ROOMY, max_num_seqs=6, max_num_batched_tokens=4, block_size=4, kv_cache_tokens=180, admission_watermark=-3.0
)
DRAFTING = dataclasses.replace(ROOMY, speculation="ngram", draft_length="fixed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bars"), Shape(vocab=VOCAB), seed=3)


def run(directory: Path, config: EngineConfig, asked: dict[str, SamplingParams]) -> dict[tuple[str, int], list[int]]:
    engine = make_engine(directory, config)
    for priority, (name, params) in enumerate(asked.items()):
        engine.add(EngineRequest(name, PROMPT, params, priority))
    out: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            out.setdefault((event.request_id, event.output_index), []).extend(event.token_ids)
    return out


def params(**fields: Any) -> SamplingParams:  # noqa: ANN401 # of SamplingParams' types
    return SamplingParams(**{"max_tokens": 60, "ignore_eos": True, "n": 2, **fields})


def contains(ids: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(ids[at : at + len(word)]) == word for at in range(len(ids)))


@pytest.mark.parametrize("config", [ROOMY, TIGHT, DRAFTING], ids=["roomy", "tight", "drafting"])
def test_outputs_have_no_bad_word_and_do_not_depend_on_company(directory: Path, config: EngineConfig) -> None:
    free = run(directory, ROOMY, {"r": params(seed=1)})
    pairs = [pair for ids in free.values() for pair in itertools.pairwise(ids)]
    words = tuple(dict.fromkeys([*pairs[::3], (free["r", 0][4],), tuple(free["r", 1][:3])]))
    asked = {f"r{seed}": params(seed=seed, bad_words=words, bad_token_ids=(7, 8)) for seed in range(4)}
    alone: dict[tuple[str, int], list[int]] = {}
    for name, one in asked.items():
        alone |= run(directory, ROOMY, {name: one})
    together = run(directory, config, asked)
    assert together == alone
    for ids in together.values():
        assert len(ids) == 60 and not {7, 8} & set(ids) and not any(contains(ids, word) for word in words)


LIMITS = Limits(context_length=100_000, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"bad_token_ids": (VOCAB,)}, "bad_token_ids[0]"),
        ({"bad_token_ids": (1,) * 4097}, "bad_token_ids"),
        ({"bad_words": ((),)}, "bad_words[0]"),
        ({"bad_words": ((1,), (2, VOCAB))}, "bad_words[1][1]"),
        ({"bad_words": ((1,),) * 129}, "bad_words"),
        ({"bad_words": ((1,) * 130,)}, "bad_words[0]"),
        ({"bad_words": ((1,),), "beam_width": 2}, "beam"),
        ({"logprobs": 0, "logprob_token_ids": (1,) * 33}, "logprob_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": (-1,)}, "logprob_token_ids[0]"),
        ({"logprob_token_ids": (1,)}, "logprob_token_ids"),
        ({"logprobs": 0, "logprob_token_ids": (1,), "beam_width": 2}, "logprob_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"grammar": "x" * ((1 << 20) + 1)}, "constraint"),
        ({"grammar": "x", "ignore_eos": True}, "stop.ignore_eos"),
        ({"grammar": "x", "allowed_token_ids": (1,)}, "allowed_token_ids"),
    ],
    ids=range(15),
)
def test_what_is_out_of_range_is_refused_by_name(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(ServiceError) as caught:
        check_params(SamplingParams(**asked), LIMITS)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)
    assert len(caught.value.message) < 200


def test_a_prompt_may_be_too_long_to_be_told() -> None:
    check_prompt(49_932, SamplingParams(prompt_logprobs=20, max_tokens=1), LIMITS)
    with pytest.raises(ServiceError) as caught:
        check_prompt(49_933, SamplingParams(prompt_logprobs=20, max_tokens=1), LIMITS)
    assert caught.value.field == "prompt_logprobs"
