"""A request's tokens depend on the request alone: in any batch, order, chunks, preempted, drafted, resumed, and beside
a request whose logits are NaN."""

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.model import Model
from sluice_server.engine.request import EngineRequest, SamplingParams
from tests.engine.test_engine_oracle import ROOMY, make_engine, some_prompts
from tests.oracle.checkpoints import Shape, make_checkpoint

VOCAB = 111
NUM = 64
LARGE = dataclasses.replace(ROOMY, max_num_seqs=NUM, kv_cache_tokens=NUM * 128)
WAYS = {
    "64 at once": LARGE,
    "chunks": dataclasses.replace(LARGE, max_num_batched_tokens=67),
    "preempted": dataclasses.replace(
        ROOMY, max_num_seqs=24, max_num_batched_tokens=31, kv_cache_tokens=320, admission_watermark=-3.0
    ),
    "drafted": dataclasses.replace(LARGE, speculation="ngram", draft_length="fixed"),
}
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"top_k": 7, "min_p": 0.01},
    {"typical_p": 0.8},
    {"presence_penalty": 0.7, "frequency_penalty": -0.4},
    {"repetition_penalty": 1.3, "logprobs": 2, "logprob_token_ids": (3, 5)},
    {"logit_bias": ((5, 4.0), (9, -4.0)), "min_tokens": 9, "ignore_eos": False},
    {"allowed_token_ids": tuple(range(0, VOCAB, 2)), "logprobs": 0},
    {"bad_token_ids": (1, 2, 3), "bad_words": ((7, 8), (9,), (4, 4, 4))},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.95, "prompt_logprobs": 1},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sampled"), Shape(vocab=VOCAB), seed=5)


def requests() -> dict[str, EngineRequest]:
    rng = random.Random(3)
    made = {}
    for at, (name, prompt) in enumerate(some_prompts(VOCAB, NUM).items()):
        given = {"max_tokens": 24, "ignore_eos": True, "seed": rng.getrandbits(64), **PARAMETERS[at % len(PARAMETERS)]}
        made[name] = EngineRequest(name, tuple(prompt), SamplingParams(**given), priority=at % 5)
    return made


def run(engine: Engine, asked: list[EngineRequest]) -> tuple[dict[str, list[int]], list[str]]:
    """Tokens of each request, and those that failed."""
    for request in asked:
        engine.add(request)
    out: dict[str, list[int]] = {request.request_id: [] for request in asked}
    failed = []
    while engine.has_work:
        events = engine.step()
        failed += [name for name, _ in events.failed]
        for event in events.sampled:
            out[event.request_id].extend(event.token_ids)
    return out, failed


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, list[int]]:
    """The outputs of each request alone, one after the other."""
    engine, out = make_engine(directory, ROOMY), {}
    for name, request in requests().items():
        out[name] = run(engine, [request])[0][name]
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ["as they came", "shuffled"])
def test_tokens_do_not_depend_on_the_way(directory: Path, expected: dict[str, list[int]], way: str, order: str) -> None:
    asked = list(requests().values())
    if order == "shuffled":
        random.Random(1).shuffle(asked)
    engine = make_engine(directory, WAYS[way])
    out, failed = run(engine, asked)
    assert out == expected and not failed
    assert (engine.scheduler.num_preemptions > 0) == (way == "preempted")


def test_tokens_go_on_behind_what_was_received(directory: Path, expected: dict[str, list[int]]) -> None:
    had = {name: ids[: 1 + at % 20] for at, (name, ids) in enumerate(expected.items())}
    asked = [
        dataclasses.replace(request, resume_ids=(tuple(had[name]),))
        for name, request in requests().items()
        if len(had[name]) < len(expected[name])
    ]
    out, failed = run(make_engine(directory, LARGE), asked)
    assert not failed and len(out) > 50
    for name, ids in out.items():
        assert had[name] + ids == expected[name]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_of_no_numbers_fails_its_request_only(
    directory: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    real, steps = Model.logits, [0]

    def broken(model: Model, hidden: torch.Tensor) -> torch.Tensor:
        logits = real(model, hidden).clone()
        steps[0] += 1
        if steps[0] == 9:
            logits[11, 50 if math.isnan(value) or value > 0 else slice(None)] = value
        return logits

    monkeypatch.setattr(Model, "logits", broken)
    asked = [one for one in requests().values() if one.params.prompt_logprobs < 0]
    out, failed = run(make_engine(directory, LARGE), asked)
    assert len(failed) == 1 and len(out[failed[0]]) < len(expected[failed[0]])
    for name, ids in out.items():
        assert name in failed or ids == expected[name]


def test_wide_vocabularies(tmp_path: Path) -> None:
    """Ids up to the width of the logits, and none beyond."""
    make_checkpoint(
        tmp_path, Shape(vocab=32_003, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=16)
    )
    config: EngineConfig = dataclasses.replace(ROOMY, max_num_seqs=8)
    wide: list[dict[str, Any]] = [{}, {"logit_bias": ((32_002, 100.0),)}, {"top_p": 0.9}, {"typical_p": 0.9}]
    asked = [
        EngineRequest(f"{at}", (1, 2, 3), SamplingParams(max_tokens=12, ignore_eos=True, seed=at, **given))
        for at, given in enumerate(wide)
    ]
    together, failed = run(make_engine(tmp_path, config), asked)
    assert not failed and set(together["1"]) == {32_002}
    for request in asked:
        assert run(make_engine(tmp_path, config), [request])[0] == {request.request_id: together[request.request_id]}
