"""Drafts together with everything that a request may ask for: grammars, log probabilities, penalties, ends, several
outputs, prefix hits, preemption, chunks, credit; and outputs that go on behind what was received."""

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.request import EngineRequest, FinishReason, SamplingParams
from sluice_server.kernels.contract import is_batch_invariant
from sluice_server.services.checkpoint.grammar_ids import grammars_of
from sluice_server.services.messages.work import Constraint, ConstraintForm
from sluice_server.services.tokenizer.grammar_forms import grammar_of
from sluice_server.services.tokenizer.grammar_frames import GrammarJob
from tests.engine.speculation.test_verification import Prophet
from tests.engine.test_engine_oracle import ROOMY, make_engine
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.heads import make_head
from tests.oracle.schemas import SCHEMAS
from tests.oracle.tokenizers import byte_level_bpe

SHAPE = Shape(vocab=404, layers=3, context=1024)
WIDE = dataclasses.replace(ROOMY, max_num_seqs=24, kv_cache_tokens=16 * 1024)
# Nine tokens a step, and blocks for two or three of the outputs below: chunks and preemption are the rule.
NARROW = dataclasses.replace(WIDE, max_num_batched_tokens=9, kv_cache_tokens=240, admission_watermark=-3.0)
ROUNDING = 1e-5  # of log probabilities that were summed in another order
ENDS = (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH)
Key = tuple[str, int]  # request id, output


@dataclasses.dataclass
class Output:
    """An output as its client receives it."""

    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    finish: FinishReason | None = None


def grammar(form: ConstraintForm, source: str) -> str:
    return grammar_of(GrammarJob(Constraint(form, source)))


def asked() -> dict[str, EngineRequest]:
    """Requests that have only a prefix of two blocks in common."""
    person = grammar(ConstraintForm.JSON_SCHEMA, json.dumps(SCHEMAS["person"]))
    digits = grammar(ConstraintForm.REGEX, r"([a-c]{2}-){3,6}[0-9]{2}")
    penalties = {"presence_penalty": 0.7, "frequency_penalty": -0.4, "repetition_penalty": 1.3}
    free = {"ignore_eos": True, "max_tokens": 30}
    param_rows: dict[str, dict[str, Any]] = {
        "schema": {"grammar": person, "temperature": 2.0, "n": 2, "logprobs": 2, "max_tokens": 60},
        "pattern": {"grammar": digits, "temperature": 1.0, **penalties, "min_tokens": 5, "max_tokens": 60},
        "greedy": {"temperature": 0.0, "logprobs": 3, "logprob_token_ids": (3, 5), "prompt_logprobs": 1, **free},
        "penalties": {"temperature": 0.8, **penalties, "n": 3, **free},
        "ends": {"temperature": 1.4, "top_k": 40, "stop_token_ids": tuple(range(0, 404, 25)), "max_tokens": 60},
        "bars": {
            "temperature": 0.9,
            "top_k": 9,
            "bad_words": ((7, 8), (9,), (4, 4)),
            "min_tokens": 9,
            "max_tokens": 30,
        },
        "best": {"temperature": 0.9, "n": 1, "best_of": 3, "logprobs": 0, **free},
        "few": {"allowed_token_ids": (6, 7, 8), "temperature": 0.6, **free},
    }
    rng, shared, made = random.Random(4), [5, 6, 7, 8] * 5, {}
    for at, (name, more) in enumerate(param_rows.items()):
        prompt = (*shared, *(rng.randrange(300) for _ in range(at % 4 * 5 + 1)))
        params = SamplingParams(seed=rng.getrandbits(64), **more)
        limit = 2 if name == "bars" else None
        made[name] = EngineRequest(name, prompt, params, priority=at, max_draft_tokens=limit)
    return made


def run(engine: Engine, requests: list[EngineRequest]) -> dict[Key, Output]:
    """Runs all at once; requests with credit get more from time to time."""
    for request in requests:
        engine.add(request)
    outputs: dict[Key, Output] = {}
    while engine.has_work:
        events = engine.step()
        engine.scheduler.check()
        assert not events.failed
        for event in events.sampled:
            output = outputs.setdefault((event.request_id, event.output_index), Output())
            output.ids.extend(event.token_ids)
            output.logprobs.extend(event.logprobs)
            output.finish = event.finish or output.finish
    assert engine.scheduler.cache.pool.num_held == 0
    return outputs


def check_logprobs(found: list[TokenLogprob], wanted: list[TokenLogprob]) -> None:
    """The same bits where attention is batch-invariant; else the same order, and numbers equal up to rounding."""
    if is_batch_invariant(torch.device("cpu"), SHAPE.head_dim)["paged_attention"]:
        assert found == wanted
        return
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        ranked = [(each.rank, each.top_ids, each.asked_ids, each.asked_ranks) for each in (one, other)]
        numbers = [(each.logprob, *each.top_logprobs, *each.asked_logprobs) for each in (one, other)]
        assert ranked[0] == ranked[1] and numbers[0] == pytest.approx(numbers[1], rel=ROUNDING)


def check_same(found: dict[Key, Output], wanted: dict[Key, Output]) -> None:
    assert found.keys() == wanted.keys()
    for key, output in found.items():
        assert (output.ids, output.finish) == (wanted[key].ids, wanted[key].finish)
        check_logprobs(output.logprobs, wanted[key].logprobs)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = make_checkpoint(tmp_path_factory.mktemp("everything"), SHAPE, seed=1)
    byte_level_bpe(made)
    (made / "head").mkdir()
    make_head(made / "head", SHAPE)
    yield made


@pytest.fixture(scope="module")
def plain(directory: Path) -> dict[Key, Output]:
    """The outputs of each request alone, without drafts."""
    engine = make_engine(directory, WIDE)
    outputs: dict[Key, Output] = {}
    for request in asked().values():
        outputs |= run(engine, [request])
    assert len(outputs) == 11 and {output.finish for output in outputs.values()} == set(ENDS), {
        key: (output.finish, len(output.ids)) for key, output in outputs.items()
    }
    return outputs


def drafting(directory: Path, config: EngineConfig, who: str, plain: dict[Key, Output], width: int = 1) -> Engine:
    """An engine whose drafts are made by `who`; with a width above one they are trees."""
    draft = {"draft": directory, "eagle": directory / "head"}.get(who)
    config = dataclasses.replace(
        config,
        speculation=who if draft or who == "grammar" else "ngram",
        draft_model="x" if draft else "",
        draft_length="adaptive" if who == "adaptive" else "fixed",
        max_draft_tokens=5 if width == 1 else 12,
        max_draft_width=width,
    )
    model = read_config(directory)
    grammars = grammars_of(directory, model.vocab_size, model.eos_ids)
    engine = build_engine(config, model, directory, limits_of(config, model, 1 << 20), draft, grammars=grammars).engine
    if who == "prophet":
        known = {key: (output.ids, output.logprobs) for key, output in plain.items()}
        return Engine(engine.scheduler, engine.runner, proposer=Prophet(known, 0.8))
    return engine


WAYS = [
    *(("prophet", WIDE, 1), ("prophet", NARROW, 1), ("ngram", NARROW, 1)),
    *(("grammar", WIDE, 1), ("grammar", NARROW, 1)),
    *(("draft", WIDE, 1), ("draft", NARROW, 1), ("eagle", NARROW, 1), ("adaptive", WIDE, 1)),
    *(("prophet", WIDE, 3), ("prophet", NARROW, 2)),
    *(("draft", WIDE, 2), ("eagle", WIDE, 4), ("eagle", NARROW, 2)),
]


@pytest.mark.parametrize(("who", "config", "width"), WAYS, ids=[f"{who}-{c.kv_cache_tokens}-{w}" for who, c, w in WAYS])
def test_everything_at_once_is_as_alone_and_without_drafts(
    directory: Path, plain: dict[Key, Output], who: str, config: EngineConfig, width: int
) -> None:
    engine = drafting(directory, config, who, plain, width)
    for _ in range(2):  # the second time with what is left of the prefixes
        check_same(run(engine, list(asked().values())), plain)
    stats = engine.scheduler.draft_stats
    assert stats.num_drafted >= stats.num_accepted > 0
    assert (engine.scheduler.num_preemptions > 0) == (config is NARROW)
    assert engine.scheduler.cache.stats.hit_tokens > 0


@pytest.mark.parametrize("who", ["prophet", "draft", "grammar"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_outputs_go_on_behind_what_was_received(
    directory: Path, plain: dict[Key, Output], who: str, share: float
) -> None:
    """As after a replay or a client's resumption: with drafts a message may end anywhere."""
    resumed: list[EngineRequest] = []
    had: dict[Key, list[int]] = {}
    for name, request in asked().items():
        if request.params.best_of:  # chosen at its end: begins anew
            continue
        ids = [plain[name, index].ids for index in range(request.params.n)]
        cut = [one[: int(len(one) * share) + index] for index, one in enumerate(ids)]
        parts = tuple(None if len(one) >= len(ids[index]) else tuple(one) for index, one in enumerate(cut))
        had |= {(name, index): one for index, one in enumerate(cut) if parts[index] is not None}
        resumed.append(dataclasses.replace(request, resume_ids=parts))
    engine = drafting(directory, NARROW, who, plain)
    outputs = run(engine, resumed)
    assert outputs.keys() == had.keys()
    for key, output in outputs.items():
        num = len(had[key])
        assert had[key] + output.ids == plain[key].ids
        check_logprobs(output.logprobs, plain[key].logprobs[num:])
        assert output.finish is plain[key].finish
    assert engine.scheduler.draft_stats.num_accepted > 0 or share > 0.5  # a model reads no prompt for so little


def test_credit_holds_drafts_back_and_changes_no_token(directory: Path, plain: dict[Key, Output]) -> None:
    engine = drafting(directory, WIDE, "prophet", plain)
    names = ["schema", "greedy", "penalties"]
    for name in names:
        engine.add(dataclasses.replace(asked()[name], credit=3))
    ids: dict[Key, list[int]] = {}
    spent, granted = dict.fromkeys(names, 0), dict.fromkeys(names, 3)
    while granted:
        for event in engine.step().sampled:
            name = event.request_id
            ids.setdefault((name, event.output_index), []).extend(event.token_ids)
            spent[name] += len(event.token_ids)
            assert spent[name] <= granted[name]
            if event.is_last:
                del granted[name]
        for name in [name for name in granted if spent[name] == granted[name]]:
            granted[name] += 4
            engine.grant(name, 4)
    assert ids == {key: output.ids for key, output in plain.items() if key[0] in names}
    assert engine.scheduler.draft_stats.num_accepted > 0
