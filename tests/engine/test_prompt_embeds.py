"""Prompt embeddings against `inputs_embeds` of `transformers`.

With chunks, batches, cache hits, preemption and resumption.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine, StepEvents
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.prompt_embeds import EmbedsType, PromptEmbeds
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams
from tests.engine import test_engine_oracle
from tests.engine.test_engine_oracle import GEMMA2, GRANITE, ROOMY, TIGHT, some_prompts
from tests.oracle.checkpoints import Shape, make_checkpoint, reference

WIDTH, NUM = 48, 16
ENABLED = dataclasses.replace(ROOMY, enable_prompt_embeds=True)
CONFIGS = {
    "roomy": ROOMY,
    "chunks": dataclasses.replace(ROOMY, max_num_batched_tokens=7),
    "preempted": TIGHT,
    "drafts": dataclasses.replace(ROOMY, speculation="ngram"),
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("embeds"), Shape(request.param, hidden=WIDTH), seed=3)


def rows_of(seed: int, num: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, WIDTH, generator=generator) * 0.3


def embeds_of(rows: torch.Tensor, dtype: EmbedsType = EmbedsType.FLOAT32) -> PromptEmbeds:
    if dtype is EmbedsType.BFLOAT16:
        return PromptEmbeds(rows.bfloat16().view(torch.int16).numpy().astype("<i2").tobytes(), dtype, len(rows))
    return PromptEmbeds(rows.numpy().astype("<f4").tobytes(), dtype, len(rows))


def asking(name: str, embeds: PromptEmbeds, ids: tuple[int, ...] = (), **fields: Any) -> EngineRequest:  # noqa: ANN401 # of EngineRequest's types
    params = fields.pop("params", SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True))
    return EngineRequest(name, (0,) * embeds.num_tokens + ids, params, prompt_embeds=embeds, **fields)


def make_engine(directory: Path, config: EngineConfig = ROOMY) -> Engine:
    return test_engine_oracle.make_engine(directory, dataclasses.replace(config, enable_prompt_embeds=True))


def steps(engine: Engine, *requests: EngineRequest) -> Iterator[StepEvents]:
    """Yields the events of every step until these requests have ended."""
    for one in requests:
        engine.add(one)
    while engine.has_work:
        events = engine.step()
        engine.scheduler.check()
        assert not events.failed
        yield events
    assert engine.scheduler.cache.pool.num_held == 0


def run(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    """Tokens of every output, by request; all are sent at once."""
    out: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for events in steps(engine, *requests):
        for event in events.sampled:
            out[event.request_id].extend(event.token_ids)
    return out


@torch.inference_mode()
def oracle(directory: Path, rows: torch.Tensor, ids: tuple[int, ...] = ()) -> list[int]:
    """Greedy tokens of `transformers` behind these rows and then these ids."""
    model = reference(directory)
    table = model.get_input_embeddings().weight
    assert isinstance(table, torch.Tensor)
    given, found = torch.cat([rows, table[list(ids)]])[None], []
    for _ in range(NUM):
        found.append(int(model(inputs_embeds=given).logits[0, -1].argmax()))
        given = torch.cat([given, table[found[-1:]][None]], dim=1)
    return found


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_tokens_equal_those_of_transformers(directory: Path, config: EngineConfig) -> None:
    shared = rows_of(1, 21)
    given = {"a": (rows_of(2, 1), ()), "b": (shared, ()), "c": (shared, (5, 9, 4)), "d": (rows_of(3, 30), (7,))}
    given |= {"again": (shared, ()), "like it": (torch.cat([shared[:-1], rows_of(4, 1)]), ())}
    engine = make_engine(directory, config)
    requests = [asking(name, embeds_of(rows), ids) for name, (rows, ids) in given.items()]
    others = some_prompts(96, 4)
    params = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True)
    plain = [EngineRequest(name, tuple(ids), params) for name, ids in others.items()]
    alone = run(make_engine(directory), plain)
    found = run(engine, [*requests, *plain])
    for name, (rows, ids) in given.items():
        assert found[name] == oracle(directory, rows, ids), name
    assert {name: found[name] for name in alone} == alone, "other requests see nothing of embeddings"
    assert engine.scheduler.num_preemptions > 0 or config is not TIGHT


def test_embeddings_share_cached_blocks_only_with_equal_ones(directory: Path) -> None:
    engine, rows = make_engine(directory), rows_of(5, 33)
    expected = run(engine, [asking("a", embeds_of(rows))])["a"]
    salted = asking("d", embeds_of(rows), cache_salt=b"another tenant")
    params = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True)
    cases = [
        ("equal", asking("b", embeds_of(rows)), 32),
        ("different", asking("c", embeds_of(rows_of(6, 33))), 0),
        ("another tenant", salted, 0),
        ("placeholders as ids", EngineRequest("e", (0,) * 33, params), 0),
    ]
    for name, request, num in cases:
        events = [event for step in steps(engine, request) for event in step.sampled]
        admission = events[0].admission
        assert admission is not None and admission.num_cached == num, name
        tokens = [token for event in events for token in event.token_ids]
        assert (tokens == expected) is (name in ("equal", "another tenant"))


def test_an_output_continues_after_the_tokens_that_were_received(directory: Path) -> None:
    request = asking("a", embeds_of(rows_of(7, 19)), (3, 8))
    expected = run(make_engine(directory), [request])["a"]
    for num in (1, 5):
        resumed = dataclasses.replace(request, resume_ids=(tuple(expected[:num]),))
        assert run(make_engine(directory), [resumed])["a"] == expected[num:]


def test_sampled_outputs_of_one_request_are_those_of_a_run_alone(directory: Path) -> None:
    params = SamplingParams(max_tokens=NUM, seed=4, n=3, ignore_eos=True)
    request = asking("a", embeds_of(rows_of(8, 11)), params=params)
    wide, narrow = (run(make_engine(directory, CONFIGS[name]), [request])["a"] for name in ("roomy", "chunks"))
    assert sorted(wide) == sorted(narrow) and len(wide) == 3 * NUM


def test_many_outputs_hash_the_embeddings_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, hashed = make_engine(directory), []

    def digest(embeds: PromptEmbeds) -> bytes:
        hashed.append(embeds)
        return bytes(32)

    monkeypatch.setattr(PromptEmbeds, "digest", property(digest))
    engine.add(asking("a", GOOD, params=SamplingParams(max_tokens=2, n=3)))
    assert hashed == [GOOD]


def test_bfloat16_is_taken_as_its_exact_float32(directory: Path) -> None:
    rows = rows_of(9, 12).bfloat16().float()
    engine = make_engine(directory)
    found = run(engine, [asking("a", embeds_of(rows, EmbedsType.BFLOAT16)), asking("b", embeds_of(rows))])
    assert found["a"] == found["b"] == oracle(directory, rows)


GOOD = embeds_of(rows_of(1, 3))
BAD_NUMBER = [bytes(np.array([[bad] + [0.0] * (WIDTH - 1)], dtype="<f4")) for bad in (np.nan, np.inf, -np.inf)]
REFUSED = {
    "a row too few": dataclasses.replace(GOOD, num_tokens=4),
    "a byte too many": dataclasses.replace(GOOD, values=GOOD.values + b"\0"),
    "another width": PromptEmbeds(bytes(4 * 3 * (WIDTH + 1)), EmbedsType.FLOAT32, 3),
    "no row": PromptEmbeds(b"", EmbedsType.FLOAT32, 0),
    "a negative number of rows": dataclasses.replace(GOOD, num_tokens=-3),
    "half the numbers": dataclasses.replace(GOOD, dtype=EmbedsType.BFLOAT16),
    "NaN": PromptEmbeds(BAD_NUMBER[0], EmbedsType.FLOAT32, 1),
    "infinity": PromptEmbeds(BAD_NUMBER[1], EmbedsType.FLOAT32, 1),
    "minus infinity": PromptEmbeds(BAD_NUMBER[2], EmbedsType.FLOAT32, 1),
    "infinities of both signs": PromptEmbeds(BAD_NUMBER[1] + BAD_NUMBER[2], EmbedsType.FLOAT32, 2),
    "NaN in bfloat16": PromptEmbeds(b"\xc0\x7f" + bytes(2 * WIDTH - 2), EmbedsType.BFLOAT16, 1),
    "too many bytes": PromptEmbeds(bytes((8 << 20) + 1), EmbedsType.FLOAT32, 1),
}


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return make_engine(directory)


@pytest.mark.parametrize("embeds", REFUSED.values(), ids=REFUSED.keys())
def test_embeddings_of_another_form_are_refused(engine: Engine, embeds: PromptEmbeds) -> None:
    with pytest.raises(ServiceError) as caught:
        engine.add(asking("a", embeds, (1,)))
    assert caught.value.code is Code.INVALID_ARGUMENT and caught.value.field.startswith("prompt_embeds.")
    assert not engine.has_work


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"params": SamplingParams(max_tokens=2, repetition_penalty=1.1)}, "repetition_penalty"),
        ({"params": SamplingParams(max_tokens=2, prompt_logprobs=1)}, "prompt_logprobs"),
        ({"params": SamplingParams(), "pooling": Pooling.LAST}, "prompt_embeds"),
        ({"is_open": True}, "keep_input_open"),
    ],
)
def test_what_reads_the_ids_of_a_prompt_is_refused_by_name(engine: Engine, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ServiceError) as caught:
        engine.add(asking("a", GOOD, (1,), **fields))
    assert caught.value.code is Code.UNIMPLEMENTED and caught.value.field == field


def test_placeholders_are_required_in_the_place_of_rows(engine: Engine) -> None:
    request = dataclasses.replace(asking("a", GOOD, (1,)), prompt_ids=(0, 0, 1, 1))
    with pytest.raises(ServiceError, match="does not begin with 3 ids 0"):
        engine.add(request)


def test_embeddings_are_refused_where_they_are_off(directory: Path) -> None:
    engine = test_engine_oracle.make_engine(directory, ROOMY)
    with pytest.raises(ServiceError) as caught:
        engine.add(asking("a", GOOD))
    assert caught.value.code is Code.UNIMPLEMENTED and caught.value.field == "prompt_embeds"


def test_the_option_gives_the_width_of_the_model(directory: Path) -> None:
    model = read_config(directory)
    assert limits_of(ROOMY, model, 1).embeds_width == 0
    assert limits_of(ENABLED, model, 1).embeds_width == WIDTH


def test_the_option_is_refused_where_no_embeddings_are_taken(directory: Path) -> None:
    model = read_config(directory)
    headless = dataclasses.replace(model, generates=False)
    with pytest.raises(ServiceError, match="--enable-prompt-embeds: this model generates nothing"):
        limits_of(ENABLED, headless, 1)
    with pytest.raises(ServiceError, match="--enable-prompt-embeds: a model over several ranks"):
        limits_of(dataclasses.replace(ENABLED, tensor_parallel_size=2), model, 1)


@pytest.mark.parametrize("shape", [Shape("gemma2", tied=True, options=GEMMA2), Shape("granite", options=GRANITE)])
def test_a_model_that_scales_its_embeddings_is_refused_at_the_start(shape: Shape, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"--enable-prompt-embeds: .* multiplies its embeddings"):
        test_engine_oracle.make_engine(make_checkpoint(tmp_path, shape), ENABLED)
