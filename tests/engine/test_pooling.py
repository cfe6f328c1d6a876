"""Pooled hidden states against `transformers`, with chunks, batches, cache hits, preemption and generations beside."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.executor.step_retry import StepRetry
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams
from sluice_server.engine.scheduler.events import Pooled
from tests.engine.test_engine_oracle import GEMMA2, GRANITE, ROOMY, TIGHT, make_engine, some_prompts
from tests.oracle.checkpoints import Shape, greedy, make_checkpoint, reference

CHUNKED = dataclasses.replace(ROOMY, max_num_batched_tokens=7)
WIDE = dataclasses.replace(ROOMY, max_num_batched_tokens=512, max_num_pooling_tokens=512)
ALONE = dataclasses.replace(WIDE, max_num_seqs=1)
DRAFTED = dataclasses.replace(CHUNKED, speculation="ngram")
BOUNDED = dataclasses.replace(WIDE, max_num_pooling_tokens=5)
# Half of Gemma 2's layers give blocks back: the same pool holds more of it.
SMALL = dataclasses.replace(TIGHT, kv_cache_tokens=80)
POOLINGS = (Pooling.LAST, Pooling.MEAN)
CONFIGS = {"chunked": CHUNKED, "wide": WIDE, "alone": ALONE, "small": SMALL, "drafted": DRAFTED, "bounded": BOUNDED}
SHAPES = [
    Shape("qwen3", head_dim=32, kv_heads=1),
    Shape("gemma2", vocab=97, tied=True, options=GEMMA2),
    Shape("granite", hidden=64, options=GRANITE),  # scales its logits
]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: shape.architecture)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pooled"), request.param, seed=4)


def expected(directory: Path, prompts: dict[str, list[int]], pooling: Pooling) -> dict[str, torch.Tensor]:
    """The oracle's vector of every prompt: its last hidden state behind the final norm, or the mean of all."""
    model = reference(directory).base_model
    found = {}
    with torch.inference_mode():
        for name, ids in prompts.items():
            states = model(torch.tensor([ids])).last_hidden_state[0]
            found[name] = states[-1] if pooling is Pooling.LAST else states.mean(0)
    return found


def pooled(engine: Engine, prompts: dict[str, list[int]], pooling: Pooling, others: int = 0) -> dict[str, Pooled]:
    """The event of every prompt, sent together with `others` generations; each ends once."""
    for i, (name, ids) in enumerate(prompts.items()):
        if i < others:
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            engine.add(EngineRequest(f"other-{i}", tuple(ids), params))
        engine.add(EngineRequest(name, tuple(ids), SamplingParams(), pooling=pooling))
    found: dict[str, Pooled] = {}
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        events = engine.step()
        engine.scheduler.check()
        assert not events.failed
        for sampled in events.sampled:
            tokens.setdefault(sampled.request_id, []).extend(sampled.token_ids)
        for event in events.pooled:
            assert event.request_id not in found
            found[event.request_id] = event
    assert found.keys() == prompts.keys() and len(tokens) == others
    assert all(len(ids) == 12 for ids in tokens.values()), "each generation goes on to its end"
    assert engine.scheduler.cache.pool.num_held == 0
    return found


def vector(event: Pooled) -> torch.Tensor:
    return torch.frombuffer(bytearray(event.vector), dtype=torch.float32)


def assert_equal(found: dict[str, Pooled], want: dict[str, torch.Tensor]) -> None:
    for name, one in want.items():
        got = vector(found[name])
        assert torch.cosine_similarity(got, one, dim=0) >= 0.99999, name
        assert got.norm().item() == pytest.approx(one.norm().item(), rel=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_the_models_own(directory: Path, pooling: Pooling, name: str) -> None:
    config, prompts = CONFIGS[name], some_prompts(97, 9)
    engine, want = make_engine(directory, config), expected(directory, prompts, pooling)
    assert_equal(pooled(engine, prompts, pooling, others=4), want)
    again = pooled(engine, prompts, pooling)  # now with what is left of the prefixes
    assert_equal(again, want)
    assert (engine.scheduler.num_preemptions > 0) == (config is SMALL)
    num_cached = sum(event.num_cached for event in again.values())
    assert (num_cached > 0) == (pooling is Pooling.LAST), "a mean needs all hidden states"


def test_generations_beside_are_unchanged(directory: Path) -> None:
    prompts = some_prompts(97, 6)
    engine = make_engine(directory, CHUNKED)
    for name, ids in prompts.items():
        engine.add(EngineRequest(f"{name}-v", tuple(ids), SamplingParams(), pooling=Pooling.MEAN))
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(name, tuple(ids), params))
    out: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        for event in engine.step().sampled:
            out[event.request_id].extend(event.token_ids)
    oracle = reference(directory)
    assert out == {name: greedy(oracle, ids, 8) for name, ids in prompts.items()}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_may_fill_the_context(tmp_path: Path, pooling: Pooling) -> None:
    shape = Shape("qwen3", context=40)
    engine = make_engine(make_checkpoint(tmp_path, shape), dataclasses.replace(CHUNKED, kv_cache_tokens=40))
    prompts = {str(num): [(3 * i) % shape.vocab for i in range(num)] for num in (1, 39, 40)}
    assert_equal(pooled(engine, prompts, pooling), expected(tmp_path, prompts, pooling))
    with pytest.raises(ServiceError, match="prompt has 41 tokens; this model allows 40") as refused:
        engine.add(EngineRequest("41", (1,) * 41, SamplingParams(), pooling=pooling))
    assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    with pytest.raises(ServiceError, match="has no tokens"):
        engine.add(EngineRequest("0", (), SamplingParams(), pooling=pooling))
    assert not engine.has_work


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_step_that_fails_once_is_computed_again(
    directory: Path, pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows alone and in halves give the same vectors: a sum counts no chunk twice."""
    prompts = some_prompts(97, 5)
    engine = make_engine(directory, dataclasses.replace(WIDE, max_num_batched_tokens=24))
    whole = StepRetry.result

    def again(self: StepRetry) -> object:
        self._pending = None  # as if the launch had failed after it was computed
        return whole(self)

    monkeypatch.setattr(StepRetry, "result", again)
    assert_equal(pooled(engine, prompts, pooling, others=2), expected(directory, prompts, pooling))


def test_a_vector_without_usable_numbers_fails_its_request_alone(directory: Path) -> None:
    engine = make_engine(directory, ROOMY)
    model = engine.runner._model  # type: ignore[attr-defined] # only the plain runner has it
    model.embeddings[5] = math.nan
    for name, ids in (("bad", (1, 5)), ("good", (1, 2))):
        engine.add(EngineRequest(name, ids, SamplingParams(), pooling=Pooling.LAST))
    events = engine.step()
    assert [name for name, _ in events.failed] == ["bad"] and [one.request_id for one in events.pooled] == ["good"]


def test_vectors_in_bfloat16_are_close(directory: Path) -> None:
    prompts = some_prompts(97, 3)
    config: EngineConfig = dataclasses.replace(ROOMY, dtype="bfloat16")
    found, want = (
        pooled(make_engine(directory, config), prompts, Pooling.MEAN),
        expected(directory, prompts, Pooling.MEAN),
    )
    assert all(torch.cosine_similarity(vector(found[name]), want[name], dim=0) > 0.99 for name in prompts)
