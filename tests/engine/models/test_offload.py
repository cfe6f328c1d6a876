"""Weights of layers in a file: the same tokens, two layers in memory at a time, and what is refused."""

import dataclasses
import errno
import mmap
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sluice_server.engine.build import build_engine
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.offload.choice import choose_layers
from sluice_server.engine.models.offload.file_store import FileStore, MappedWeights, offload_folder
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.startup.formats import choose_formats
from sluice_server.engine.worker.startup.planned import layer_bytes, plan_memory
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats.packer import LinearPacker
from tests.engine.adapters.test_engine_adapters import load, write_all
from tests.engine.adapters.test_engine_adapters import run as run_adapters
from tests.oracle.checkpoints import Shape, make_checkpoint

CPU = torch.device("cpu")
NUM_LAYERS = 5
EXPERTS = (("num_experts", 6), ("num_experts_per_tok", 2), ("moe_intermediate_size", 40))
WINDOWS = ["sliding_attention", "full_attention"]
SHAPES = {
    "llama": Shape(layers=NUM_LAYERS),
    "experts": Shape("qwen3_moe", layers=NUM_LAYERS, options=EXPERTS),
    "gemma3": Shape(
        "gemma3",
        layers=NUM_LAYERS,
        options=(("sliding_window", 9), ("layer_types", [WINDOWS[i % 2] for i in range(NUM_LAYERS)])),
    ),
    "a shared expert": Shape(
        "qwen2_moe", layers=NUM_LAYERS, options=(*EXPERTS, ("shared_expert_intermediate_size", 56))
    ),
    "olmo2": Shape("olmo2", layers=NUM_LAYERS),
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, int8": {"quantization": "int8"},
    "experts": {"dtype": "float32"},
    "gemma3": {"quantization": "int8"},
    "llama, int4": {"quantization": "int4"},
    "llama, bfloat16": {"dtype": "bfloat16"},
    "llama, shards of sums": {"sum_shards": 2},
    "llama, batch-invariant": {"dtype": "float32", "batch_invariant": True},
    "experts, int8": {"quantization": "int8"},
    "a shared expert": {},
    "olmo2": {},
}
QUICK = 4
CONFIG = EngineConfig(
    device="cpu", kv_cache_tokens=512, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=96, threads=1
)
PROMPTS = {"long": tuple(range(1, 24)), "short": (9,) * 6, "other": (5, 50, 17)}


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def build(directory: Path, **changes: Any) -> BuiltEngine:  # noqa: ANN401 # of settings' types
    config, model = dataclasses.replace(CONFIG, **changes), read_config(directory)
    return build_engine(config, model, directory, limits_of(config, model, 1 << 20))


def planned(directory: Path, **changes: Any) -> list[int]:  # noqa: ANN401
    """The bytes of each layer."""
    return layer_bytes(directory, read_config(directory), choose_formats(dataclasses.replace(CONFIG, **changes), CPU))


def run(engine: Engine, names: tuple[str, ...]) -> dict[str, list[int]]:
    """Greedy tokens of prompts that are computed together."""
    found: dict[str, list[int]] = {}
    for name in names:
        found[name] = []
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        engine.add(EngineRequest(name, PROMPTS[name], params))
    while engine.has_work:
        for event in engine.step().sampled:
            found[event.request_id] += event.token_ids
    return found


def refusal(directory: Path, **changes: Any) -> ServiceError:  # noqa: ANN401
    with pytest.raises(ServiceError) as found:
        build(directory, **changes)
    assert found.value.reason == "INVALID_SETTING" and found.value.field == "weights_offload_bytes"
    assert "--weights-offload-bytes: " in found.value.message
    return found.value


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i < QUICK else pytest.mark.long) for i, name in enumerate(CASES)]
)
def test_tokens_are_equal_alone_and_together(name: str, tmp_path: Path) -> None:
    directory, changes = make_checkpoint(tmp_path, SHAPES[name.split(",")[0]]), CASES[name]
    sizes, found = planned(directory, **changes), list[dict[str, list[int]]]()
    for num_layers in (0, 3, NUM_LAYERS):
        built = build(directory, **changes, weights_offload_bytes=sum(sizes[:num_layers]))
        assert any("the weights of" in note for note in built.computing.notes) is (num_layers > 0)
        alone = [run(built.engine, (one,))[one] for one in PROMPTS]
        together = run(built.engine, tuple(PROMPTS))
        counted = built.offloaded
        if num_layers:
            assert counted is not None and counted.where == "file"
            assert counted.num_bytes > 0 and counted.waited_s > 0
        else:
            assert counted is None
        assert alone == [*together.values()]
        found.append(together)
        built.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.long
def test_rows_with_adapters_and_drafts_of_a_model_are_equal(tmp_path: Path) -> None:
    directory, folder = make_checkpoint(tmp_path / "base", SHAPES["llama"]), tmp_path / "adapters"
    write_all(folder, read_config(directory))
    size, found = sum(planned(directory)), list[dict[str, list[int]]]()
    for asked in (0, size):
        built = build(directory, weights_offload_bytes=asked, max_adapters=8, adapter_dir=str(folder))
        refs = [None, *(load(built.engine, name) for name in ("all", "mlp"))]
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        rows = [
            EngineRequest(name, PROMPTS[name], params, adapter=ref) for name, ref in zip(PROMPTS, refs, strict=True)
        ]
        found.append(run_adapters(built.engine, *rows))
        built.close()
    assert found[0] == found[1] and run(build(directory).engine, tuple(PROMPTS)) != found[0]
    config = dataclasses.replace(
        CONFIG, weights_offload_bytes=size, speculation="draft", draft_model="x", draft_length="fixed"
    )
    model = read_config(directory)
    built = build_engine(config, model, directory, limits_of(config, model, 1 << 20), directory)
    assert run(built.engine, tuple(PROMPTS)) == run(build(directory).engine, tuple(PROMPTS))
    assert built.engine.scheduler.draft_stats.num_accepted > 0


def test_two_layers_are_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured when a layer has come, which is when most are there."""
    directory = make_checkpoint(tmp_path, Shape(hidden=128, layers=6, intermediate=256))
    stores, measured = list[FileStore](), list[int]()
    fetch, init = MappedWeights.fetch, FileStore.__init__

    def keep(self: FileStore, *given: Any) -> None:  # noqa: ANN401
        init(self, *given)
        stores.append(self)

    def measure(self: MappedWeights) -> None:
        fetch(self)
        measured.append(sum(map(resident, stores[0]._parts)))

    monkeypatch.setattr(FileStore, "__init__", keep)
    monkeypatch.setattr(MappedWeights, "fetch", measure)
    sizes = planned(directory, dtype="float32")
    built = build(directory, weights_offload_bytes=sum(sizes[:5]), dtype="float32")
    run(built.engine, tuple(PROMPTS))
    built.close()
    sizes = [len(one.bytes) for one in stores[0]._parts]
    assert len(sizes) == 5 and len(measured) > 50
    assert max(sizes) < max(measured) <= 2 * max(sizes) and sum(sizes) > 2 * max(sizes)


def resident(part: MappedWeights) -> int:
    """Bytes of it that are in memory of this process, as the kernel says for each page."""
    first, num = part.bytes.data_ptr() // mmap.PAGESIZE, len(part.bytes) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * num), np.uint64)
    return int((pages >> 63).sum()) * mmap.PAGESIZE


def test_a_step_that_was_not_computed_to_its_end_harms_none_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_checkpoint(tmp_path, SHAPES["llama"])
    store = FileStore(offload_folder(os.environ), range(NUM_LAYERS))
    config = read_config(directory)
    with closing(store):
        load_model(directory, config, torch.float32, CPU, store=store)
    ask, is_there = store._ask, list[bool]()

    def asked(*wanted: int) -> None:
        if len(wanted) == 2:  # the layer that is to be computed, and the next
            is_there.append(wanted[0] in store._held)
        ask(*wanted)

    monkeypatch.setattr(store, "_ask", asked)
    order = (0, 1, 0, 1, 2, 3, 4, 0, 4, 2, 2)
    for number in order:
        store.reach(number)
        assert store._coming is not None
        store._coming.result()
        assert store._held == {number, (number + 1) % NUM_LAYERS}
    assert is_there == [True] * len(order)


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_what_is_planned_is_what_stays(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = make_checkpoint(tmp_path, Shape(hidden=128, layers=4, intermediate=256))
    model, sizes = read_config(directory), planned(directory, **changes)
    config = dataclasses.replace(CONFIG, **changes, weights_offload_bytes=sum(sizes[:3]))
    limits = limits_of(config, model, 1 << 20)
    whole = plan_memory(dataclasses.replace(config, weights_offload_bytes=0), (model, directory), limits, None, 1 << 30)
    less = plan_memory(config, (model, directory), limits, None, 1 << 30)
    assert whole.weights - less.weights == sizes[0] and less.cache == whole.cache
    store = FileStore(offload_folder(os.environ), (1, 2, 3))
    formats = choose_formats(config, CPU)
    with closing(store):
        load_model(directory, model, formats.dtype, CPU, pack=LinearPacker(formats.weights), store=store)
    for size, part in zip(sizes[1:], store._parts, strict=True):
        assert size == pytest.approx(len(part.bytes), rel=0.1)
    assert store.figures is not None and store.figures.num_bytes == pytest.approx(sum(sizes[1:]), rel=0.1)


def test_layers_are_spread_evenly_and_are_as_many_as_asked_for() -> None:
    assert choose_layers([10] * 8, 40).layers == (1, 3, 5, 7)
    assert choose_layers([10] * 8, 31).layers == (1, 3, 5, 7)
    assert choose_layers([10] * 8, 80).layers == tuple(range(8))
    assert choose_layers([10] * 8, 0).layers == ()
    uneven = choose_layers([100, 10, 10, 50, 10, 10, 60], 150)
    assert 150 <= uneven.size < 250 and uneven.window == 160 and uneven.saved == uneven.size - 160


@pytest.mark.parametrize(
    ("wanted", "words"),
    [(81, "more than the 80"), (1, "1 of 8 layers.* give 21 or more"), (20, "2 of 8 layers, and two are in memory")],
)
def test_bytes_that_cannot_be_offloaded_are_refused(wanted: int, words: str) -> None:
    with pytest.raises(ServiceError, match=words):
        choose_layers([10] * 8, wanted)
    assert choose_layers([10] * 8, 21).size == 30


def test_a_model_of_two_layers_has_none_to_offload(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, Shape())
    assert "leave it out" in refusal(directory, weights_offload_bytes=1).message


def test_a_disk_that_is_full_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path, SHAPES["llama"])
    allocate = os.posix_fallocate

    def full(file: int, first: int, size: int) -> None:
        if first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, first, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = refusal(directory, weights_offload_bytes=sum(planned(directory))).message
    assert "No space left on device" in message and str(tmp_path / "cache") in message
    assert not [*(tmp_path / "cache/sluice/offload").iterdir()]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path, SHAPES["llama"])
    size = sum(planned(directory))
    for given in (str(directory / "config.json"), "/proc", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        message = refusal(directory, weights_offload_bytes=size).message
        assert given in message and "XDG_CACHE_HOME" in message


def test_weights_of_torch_operators_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path, SHAPES["llama"])
    monkeypatch.setattr(builds, "is_available", lambda: False)
    asked = sum(planned(directory, quantization="int8"))
    assert "CPU kernels" in refusal(directory, quantization="int8", weights_offload_bytes=asked).message


@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_are_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    directory = make_checkpoint(tmp_path, SHAPES["llama"])
    assert "several ranks" in refusal(directory, **changes, weights_offload_bytes=1).message
