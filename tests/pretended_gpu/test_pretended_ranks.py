"""Ranks with a pretended GPU each: the tokens of transformers, from recorded steps with sums and shared ids in them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import is_gloo_available

from sluice_server.engine.parallel.device_group import DeviceGroupRunner
from sluice_server.engine.parallel.messages import BeginStep
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.startup import allocation
from tests.oracle.checkpoints import greedy, reference
from tests.pretended_gpu.cuda import current_gpu, pretend
from tests.pretended_gpu.device_ranks import over_gpus
from tests.pretended_gpu.test_pretended_engines import (
    CONFIG,
    EXPERTS,
    INVARIANT,
    LLAMA,
    LOOK_UP,
    NUM,
    PROMPTS,
    W8A16,
    WITH_DRAFTS,
    checkpoint,
    run,
    wanted,
)

pytestmark = pytest.mark.skipif(not is_gloo_available(), reason="torch has no gloo")

TWO = dataclasses.replace(CONFIG, tensor_parallel_size=2, threads=1)
SMALL = dataclasses.replace(TWO, max_num_batched_tokens=8, max_num_seqs=1, kv_cache_tokens=0)
HEADS = dataclasses.replace(LLAMA, heads=4, kv_heads=2)
SHAPES = {
    "llama": HEADS,
    "qwen3": dataclasses.replace(HEADS, architecture="qwen3"),
    "experts": dataclasses.replace(HEADS, architecture="qwen3_moe", options=EXPERTS),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "experts": ("experts", {}),
    "qwen3, W8A16, look-up": ("qwen3", {**W8A16, **LOOK_UP}),
    "experts, W8A16": ("experts", W8A16),
    "llama, batch-invariant": ("llama", INVARIANT),
    "llama, 4 shards": ("llama", {"sum_shards": 4}),
    "llama, memory of one another": ("llama", {}),
    "experts, W8A16, 4 shards, memory of one another": ("experts", {**W8A16, "sum_shards": 4}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts in chunks, decoding in recorded steps, of two rows at once."""
    shape, changes = CASES[name]
    directory = checkpoint(tmp_path, SHAPES[shape])
    num = WITH_DRAFTS if "look-up" in name else NUM
    config, reach = dataclasses.replace(TWO, **changes), "memory" in name
    with pretend() as gpu, over_gpus(gpu, directory, config, reach_one_another=reach) as ranks:
        assert isinstance(ranks.engine.runner, DeviceGroupRunner)
        found = run(ranks.engine, max_tokens=num)
        assert "look-up" not in name or ranks.engine.scheduler.draft_stats.num_accepted > 0
    assert found == wanted(directory, num)
    assert all(one.replays > 0 for one in ranks.gpus)


def test_steps_are_graphs_with_their_sums_and_ids_and_no_host_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replay for the forward pass and one behind it, on each rank: a sum of embeddings, two for each layer, the
    logits, and the ids. The tokens are those of transformers, and the rank with the least memory sizes the cache."""
    measured = list[int]()

    def room(*given: Any) -> int:  # noqa: ANN401 # all that is measured
        measured.append(40_000 if current_gpu() is gpu else 9_000)
        return measured[-1]

    monkeypatch.setattr(allocation, "cuda_cache_bytes", room)
    directory = checkpoint(tmp_path, HEADS)
    with pretend() as gpu, over_gpus(gpu, directory, SMALL) as ranks:
        engine, prompt = ranks.engine, PROMPTS["short"]
        token_bytes = 2 * HEADS.layers * (HEADS.kv_heads // 2) * HEADS.head_dim * 4
        assert sorted(measured) == [9_000, 40_000]
        assert engine.scheduler.cache.num_blocks == 9_000 // token_bytes // SMALL.block_size
        engine.add(EngineRequest("a", prompt, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
        found = [event.token_ids for _ in range(2) for event in engine.step().sampled]
        before = [(one.replays, one.launches.copy(), one.captures) for one in ranks.gpus]
        sums = [one.begun.copy() for one in ranks.collectives]
        for one in ranks.gpus:
            one.memory.refuses_waits = True
        while engine.has_work:
            found += [event.token_ids for event in engine.step().sampled]
        steps = sum(isinstance(order, BeginStep) for order in engine.runner._workers.orders) - 2  # type: ignore[attr-defined]
        for one, (replays, launches, captures) in zip(ranks.gpus, before, strict=True):
            assert one.replays - replays == 2 * steps and one.captures == captures
            assert set(one.launches - launches) <= {"write_runs_kernel"}, "what the host knows better is written"
        for group, earlier in zip(ranks.collectives, sums, strict=True):
            assert group.begun - earlier == {"allgather": (2 + 2 * HEADS.layers) * steps, "broadcast": steps}
    assert [id for ids in found for id in ids] == greedy(reference(directory), list(prompt), 6)
    assert len({one.calls for one in ranks.sums}) == 1 and steps > 3


def test_sums_of_recorded_steps_are_read_from_other_devices_behind_one_barrier_each(tmp_path: Path) -> None:
    """And one at the beginning of a step. NCCL gathers the logits and shares the ids."""
    directory = checkpoint(tmp_path, HEADS)
    with pretend() as gpu, over_gpus(gpu, directory, SMALL, reach_one_another=True) as ranks:
        engine, prompt = ranks.engine, PROMPTS["short"]
        engine.add(EngineRequest("a", prompt, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)))
        found = [event.token_ids for _ in range(2) for event in engine.step().sampled]
        both = list(zip(ranks.collectives, ranks.memories, strict=True))
        before = [(group.begun.copy(), memory.barriers) for group, memory in both]
        while engine.has_work:
            found += [event.token_ids for event in engine.step().sampled]
        steps = sum(isinstance(order, BeginStep) for order in engine.runner._workers.orders) - 2  # type: ignore[attr-defined]
        for (group, memory), (begun, barriers) in zip(both, before, strict=True):
            assert group.begun - begun == {"allgather": steps, "broadcast": steps}
            assert memory.barriers - barriers == (1 + 1 + 2 * HEADS.layers) * steps
    assert [id for ids in found for id in ids] == greedy(reference(directory), list(prompt), 6)
    assert len({one.calls for one in ranks.sums}) == 1 and steps > 3
