"""A whole engine on a GPU: likely tokens according to transformers, recorded steps equal to computed ones, no kernel
compiled and no wait of the host once it is warm."""

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.plan import IN_FLIGHT, StepPlan
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.overlapped import OverlappedRunner
from sluice_server.kernels.triton import support
from tests.gpu.computed import computes_each_step
from tests.oracle.checkpoints import Shape, make_checkpoint, reference

SHAPES = {
    "0.6B": Shape("qwen3", 151_936, 1024, 28, 16, 8, 128, 3072, 2048, tied=True, spread=0.04),
    "1B": Shape("llama", 128_256, 2048, 16, 32, 8, 64, 8192, 2048, tied=True, spread=0.03),
    # Windows, caps, norms on both sides.
    "gemma2": Shape("gemma2", 64_000, 2304, 8, 8, 4, 256, 9216, 2048, tied=True, spread=0.03),
}
CONFIG = EngineConfig(device="cuda", dtype="bfloat16", block_size=32, max_num_seqs=8, kv_cache_tokens=16_384)
SLACK = 256 << 20  # bytes that a driver takes for code when it is first run
MARGIN = 0.08  # of the largest logit's size: what bfloat16 may take for the most likely; of 2,600 tokens, 0.051 at most


@pytest.fixture(scope="module", params=list(SHAPES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("model"), request.param)


def made(folder: Path, name: str) -> Path:
    """A checkpoint of one of the shapes; a GPU draws a billion numbers in no time."""
    with torch.device("cuda"):
        return make_checkpoint(folder, SHAPES[name])


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    config = read_config(checkpoint)
    yield build_engine(CONFIG, config, checkpoint, limits_of(CONFIG, config, 1 << 20)).engine
    torch.cuda.empty_cache()


def run(engine: Engine, num: int, temperature: float = 0.0, offset: int = 0, first: int = 0) -> dict[str, list[int]]:
    """Tokens of `num` prompts at once."""
    out: dict[str, list[int]] = {}
    for i in range(first, first + num):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=i, ignore_eos=True)
        out[f"{i}"] = []
        engine.add(EngineRequest(f"{i}", prompt_of(i + offset), params))
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            out[event.request_id] += event.token_ids
    return out


def prompt_of(i: int) -> tuple[int, ...]:
    return tuple(range(1 + i, 1 + i + 5 + 61 * i))


@torch.inference_mode()
def behind(checkpoint: Path, found: dict[str, list[int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens [L] of each answer, and the logits [L, V] from which transformers would choose them, in float32."""
    model: torch.nn.Module = reference(checkpoint)
    model.cuda()
    for i, (_, tokens) in enumerate(found.items()):
        whole = torch.tensor([[*prompt_of(i), *tokens]], device="cuda")
        yield torch.tensor(tokens, device="cuda"), model(whole).logits[0, len(prompt_of(i)) - 1 : -1]


def test_tokens_are_the_likeliest_of_transformers(engine: Engine, checkpoint: Path) -> None:
    for tokens, logits in behind(checkpoint, run(engine, 6)):
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        assert ((logits.amax(1) - chosen) / logits.abs().amax(1)).max() <= MARGIN


def test_greedy_tokens_in_float32_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads of 64, whose tiles fit into registers in float32, too; no user may take it, as others do not."""
    monkeypatch.setattr(support, "DTYPES", (*support.DTYPES, torch.float32))
    checkpoint = made(tmp_path, "1B")
    config = read_config(checkpoint)
    asked = dataclasses.replace(CONFIG, dtype="float32")
    engine = build_engine(asked, config, checkpoint, limits_of(asked, config, 1 << 20)).engine
    for tokens, logits in behind(checkpoint, run(engine, 6)):
        assert torch.equal(tokens, logits.argmax(1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_recorded_step_equals_a_computed_one(
    checkpoint: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a prefix cache: a prompt of which a part is cached is computed in other chunks, and has other bits."""
    recorded = run(uncached(checkpoint), 4, temperature)
    computes_each_step(monkeypatch)
    assert run(uncached(checkpoint), 4, temperature) == recorded


def uncached(checkpoint: Path) -> Engine:
    """An engine that computes every prompt."""
    config = read_config(checkpoint)
    asked = dataclasses.replace(CONFIG, prefix_caching=False)
    engine = build_engine(asked, config, checkpoint, limits_of(asked, config, 1 << 20)).engine
    assert isinstance(engine.runner, OverlappedRunner)
    return engine


def test_nothing_compiles_once_it_is_warm(engine: Engine) -> None:
    """An engine is warm after its start, before any request."""

    def fail(*arguments: object, **named: object) -> None:
        raise AssertionError(f"compiled on the request path: {arguments} {named}")

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = fail
    try:
        run(engine, 8, offset=1)
        run(engine, 3, offset=2)
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def test_tokens_do_not_depend_on_company_where_that_was_asked(checkpoint: Path) -> None:
    """Alone, computed directly or recorded, and beside others, in chunks of other sizes."""
    config = read_config(checkpoint)
    asked = dataclasses.replace(CONFIG, batch_invariant=True, prefix_caching=False)
    engine = build_engine(asked, config, checkpoint, limits_of(asked, config, 1 << 20)).engine
    together = run(engine, 8, temperature=1.0)
    for i in (1, 4, 7):
        assert run(engine, 1, temperature=1.0, first=i) == {f"{i}": together[f"{i}"]}


def test_the_share_of_memory_holds(checkpoint: Path) -> None:
    """With every step recorded, and a cache that takes what was left for it."""
    asked = dataclasses.replace(CONFIG, gpu_memory_utilization=0.05, kv_cache_tokens=0, max_num_seqs=64)
    config = read_config(checkpoint)
    gc.collect()
    torch.cuda.empty_cache()
    engine = build_engine(asked, config, checkpoint, limits_of(asked, config, 1 << 20)).engine
    while engine.idle():
        continue
    run(engine, 8)
    free, total = torch.cuda.mem_get_info()
    assert total - free <= 0.05 * total + SLACK


def decode(start: int, token: int) -> StepPlan:
    """A decode plan of one row in slot 0."""
    return StepPlan(9, [0], [1], [start], [token], [True], [], [])


def test_the_host_does_not_wait_in_steady_decode(engine: Engine) -> None:
    """Recorded steps are launched one after the other without any synchronisation."""
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True)
    engine.add(EngineRequest("a", prompt_of(3), params))
    for _ in range(4):
        engine.step()
    start = len(prompt_of(3)) + 3
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [engine.runner.launch(decode(start + i, IN_FLIGHT if i else 5)) for i in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(one.collect().token_ids[0] >= 0 for one in pending)
