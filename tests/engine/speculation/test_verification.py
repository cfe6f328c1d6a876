"""Drafts change no token: at every length, right or wrong, with everything else on."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.plan import DraftRequest, DraftTree
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.speculation.proposer import Draft
from tests.engine.test_engine_oracle import (
    ALL_PARAMETERS,
    NAMES,
    ROOMY,
    SHAPES,
    TIGHT,
    make_engine,
    some_prompts,
    tight,
)
from tests.oracle.checkpoints import greedy, make_checkpoint, reference

Key = tuple[str, int]  # request id, output
Outputs = dict[Key, tuple[list[int], list[Any]]]  # tokens, log probabilities

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 2**63 + 11}
SEVERAL: dict[str, Any] = {**ALL_PARAMETERS, "n": 3}
BEST: dict[str, Any] = {**SAMPLED, "n": 2, "best_of": 3, "presence_penalty": 0.5}


class Prophet:
    """A proposer that drafts the tokens sampled without it, and sometimes other ones."""

    writes_cache = False

    def __init__(self, outputs: Outputs, quality: float) -> None:
        self._rng = random.Random(1)
        self._quality = quality
        self._known = sorted((tuple(ids) for ids, _ in outputs.values()), key=len, reverse=True)

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [self._branch(ask) if ask.width > 1 else self._guess(ask) for ask in asks]

    def _branch(self, ask: DraftRequest) -> DraftTree:
        """A tree: where the first guess is wrong another may be right, and others follow each of them."""
        ids, parents = self._guess(ask), list(range(-1, ask.num - 1))
        del parents[len(ids) :]
        num = len(ids)
        for at in range(num):
            for _ in range(self._rng.randrange(ask.width)):  # a branch that leaves the first one before `at`
                parent = at - 1
                for token in self._guess(ask)[at : at + self._rng.randrange(1, 4)]:
                    ids.append(token)
                    parents.append(parent)
                    parent = len(ids) - 1
        return DraftTree(tuple(ids), tuple(parents))

    def _guess(self, ask: DraftRequest) -> list[int]:
        tail = list(ask.tokens)
        for ids in self._known:
            for num in range(len(ids) - 1, 0, -1):
                if tail[-num:] == list(ids[:num]):
                    right = ids[num : num + ask.num]
                    return [token if self._rng.random() < self._quality else (token + 1) % 90 for token in right]
        return [3] * ask.num


def run(engine: Engine, prompts: dict[str, list[int]], **params: Any) -> Outputs:  # noqa: ANN401 # of SamplingParams' types
    """All outputs of every prompt, all sent at once."""
    for name, prompt in prompts.items():
        options = {"max_tokens": 20, "ignore_eos": True, **params}
        engine.add(EngineRequest(name, tuple(prompt), SamplingParams(**options)))
    outputs: Outputs = {}
    while engine.has_work:
        events = engine.step()
        engine.scheduler.check()
        assert not events.failed
        for event in events.sampled:
            ids, logprobs = outputs.setdefault((event.request_id, event.output_index), ([], []))
            assert event.first_index == len(ids)
            ids.extend(event.token_ids)
            logprobs.extend(event.logprobs)
    assert engine.scheduler.cache.pool.num_held == 0
    return outputs


def drafting(directory: Path, config: EngineConfig, num: int, known: Outputs, quality: float) -> Engine:
    """An engine that verifies up to `num` drafts a row."""
    engine = make_engine(
        directory, dataclasses.replace(config, speculation="ngram", draft_length="fixed", max_draft_tokens=num)
    )
    return Engine(engine.scheduler, engine.runner, proposer=Prophet(known, quality))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), SHAPES["llama"])


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SEVERAL, BEST], ids=["greedy", "sampled", "several", "best"])
def test_tokens_and_log_probabilities_are_those_of_plain_decoding(checkpoint: Path, params: dict[str, Any]) -> None:
    """Equal to the bit: on CPU in float32 no row's arithmetic depends on the other rows."""
    prompts = some_prompts(SHAPES["llama"].vocab, 6)
    plain = run(make_engine(checkpoint, ROOMY), prompts, **params)
    # More is let in than will fit, so that preemption is the rule; one request of three outputs alone takes 16 blocks.
    narrow = dataclasses.replace(TIGHT, kv_cache_tokens=128 if "n" in params else 112, max_num_seqs=8)
    for num, quality in ((1, 1.0), (3, 0.7), (7, 0.9), (40, 1.0), (5, 0.0)):
        for config in (ROOMY, narrow):
            engine = drafting(checkpoint, config, num, plain, quality)
            assert run(engine, prompts, **params) == plain
            assert run(engine, prompts, **params) == plain  # now with what is left of the prefixes
            stats = engine.scheduler.draft_stats
            assert stats.num_drafted > stats.num_accepted * (quality < 1.0)
            assert stats.num_accepted > 0 or not quality
            assert config is ROOMY or engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_transformers(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    directory = make_checkpoint(tmp_path, shape)
    prompts = some_prompts(shape.vocab, 6)
    oracle = reference(directory)
    want = {(name, 0): greedy(oracle, prompt, 20) for name, prompt in prompts.items()}
    known: Outputs = {key: (ids, []) for key, ids in want.items()}
    for config in (ROOMY, tight(shape)):
        engine = drafting(directory, config, 4, known, 0.8)
        outputs = run(engine, prompts, temperature=0.0)
        assert {key: ids for key, (ids, _) in outputs.items()} == want
        assert engine.scheduler.draft_stats.num_accepted > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_prompt_look_up_drafts_what_comes_again(checkpoint: Path, params: dict[str, Any]) -> None:
    """A random model knows no code: biases make it repeat itself."""
    prompts = {f"{i:032x}": [5 + i, 6, 7, 8, 5 + i, 6, 7] for i in range(3)}
    params = {**params, "allowed_token_ids": (6, 7), "max_tokens": 40}
    plain = run(make_engine(checkpoint, ROOMY), prompts, **params)
    engine = make_engine(checkpoint, dataclasses.replace(ROOMY, speculation="ngram", draft_length="fixed"))
    assert run(engine, prompts, **params) == plain
    assert engine.scheduler.draft_stats.num_accepted > 20
    assert engine.stats.num_steps < 40
