"""Adapters of a model over several ranks, whose parts of A or B they have: the tokens of one rank that adds as many
partial products, and of merged weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.adapters.files import read_adapter
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.parallel.messages import FillSlot
from sluice_server.engine.request import AdapterRef, EngineRequest, SamplingParams
from tests.engine.parallel.thread_ranks import threaded
from tests.engine.test_engine_oracle import ROOMY, SHAPES, make_engine
from tests.oracle.adapters import merged, modules, write_adapter
from tests.oracle.checkpoints import greedy, make_checkpoint

NUM = 8
PROMPT = [7, 8, 9, 10, 11, 12, 13]
GREEDY = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True)
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 3},
    "output": {"rank": 8, "targets": ("o_proj", "down_proj")},
    "queries": {"rank": 2, "targets": ("q_proj", "qkv_proj", "gate_up_proj")},
}
GROUPS: dict[str, dict[str, Any]] = {
    "tensor 2": {"tensor_parallel_size": 2},
    "two shards each": {"tensor_parallel_size": 2, "sum_shards": 4},
    "stages": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


def made(folder: Path, shape: str) -> Path:
    directory = make_checkpoint(folder / "base", SHAPES[shape])
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        write_adapter(folder / "adapters" / name, read_config(directory), seed=seed, **fields)
    return directory


def config_of(directory: Path, **changes: Any) -> EngineConfig:  # noqa: ANN401 # of settings' types
    return dataclasses.replace(ROOMY, max_adapters=2, adapter_dir=str(directory.parent / "adapters"), **changes)


def load(engine: Engine, name: str) -> AdapterRef:
    assert engine.adapters is not None
    loaded = engine.adapters.read(name).result()
    engine.adapters.add(loaded, is_pinned=False)
    return AdapterRef(loaded.digest, name, loaded.num_bytes)


def answers(engine: Engine) -> dict[str, list[int]]:
    """Tokens of the base and of all adapters, in one batch."""
    out: dict[str, list[int]] = {}
    for at, name in enumerate(["", *ADAPTERS]):
        out[f"{at:032x}"] = []
        engine.add(EngineRequest(f"{at:032x}", tuple(PROMPT), GREEDY, adapter=load(engine, name) if name else None))
    while engine.has_work:
        events = engine.step()
        assert not events.failed, events.failed
        for event in events.sampled:
            out[event.request_id] += event.token_ids
    return dict(zip(["", *ADAPTERS], out.values(), strict=True))


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_the_tokens_of_merged_weights(tmp_path: Path, group: dict[str, Any]) -> None:
    directory = made(tmp_path, "llama")
    with threaded(directory, config_of(directory, **group)) as engine:
        found = answers(engine)
    for name in ADAPTERS:
        adapter = read_adapter(tmp_path / "adapters", name, modules(read_config(directory)))
        assert found[name] == greedy(merged(directory, adapter), PROMPT, NUM), name
    assert len({tuple(one) for one in found.values()}) == len(ADAPTERS) + 1


@pytest.mark.parametrize("shape", ["phi3", "qwen2-experts"])
def test_fused_projections_and_experts_over_ranks(tmp_path: Path, shape: str) -> None:
    """Rows of a fused projection are of several parts; experts have adapters beside attention alone."""
    directory = made(tmp_path, shape)
    with threaded(directory, config_of(directory, tensor_parallel_size=2)) as engine:
        found = answers(engine)
    assert found == answers(make_engine(directory, config_of(directory, sum_shards=2)))


@pytest.mark.parametrize("formats", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["bfloat16", "int8"])
def test_the_number_of_ranks_changes_no_token(tmp_path: Path, formats: dict[str, Any]) -> None:
    directory = made(tmp_path, "llama")
    want = answers(make_engine(directory, config_of(directory, sum_shards=4, **formats)))
    with threaded(directory, config_of(directory, tensor_parallel_size=2, sum_shards=4, **formats)) as engine:
        assert answers(engine) == want


def test_a_rank_with_other_files_fails_the_request_and_no_other(tmp_path: Path) -> None:
    """Never the base's tokens, nor a mixture of two adapters."""
    directory = made(tmp_path, "llama")
    with threaded(directory, config_of(directory, tensor_parallel_size=2)) as engine:
        assert engine.adapters is not None
        tell = engine.adapters.loader.on_slot
        engine.adapters.loader.on_slot = lambda slot, path, digest: tell(slot, "output" if path else "", digest)
        engine.add(EngineRequest("a" * 32, tuple(PROMPT), GREEDY, adapter=load(engine, "all")))
        engine.add(EngineRequest("b" * 32, tuple(PROMPT), GREEDY))
        failed: dict[str, ServiceError] = {}
        ended: set[str] = set()
        while engine.has_work:
            events = engine.step()
            failed |= dict(events.failed)
            ended |= {one.request_id for one in events.sampled if one.finish is not None}
    assert (set(failed), ended) == ({"a" * 32}, {"b" * 32})


def test_a_slot_that_is_emptied_is_emptied_on_all_ranks(tmp_path: Path) -> None:
    directory = made(tmp_path, "llama")
    with threaded(directory, config_of(directory, tensor_parallel_size=2)) as engine:
        orders: list[FillSlot] = []
        assert engine.adapters is not None
        engine.adapters.loader.on_slot = lambda *filled: orders.append(FillSlot(*filled))
        ref = load(engine, "all")
        engine.idle()
        engine.adapters.drop(ref.digest)
    assert [(one.slot, one.path) for one in orders] == [(0, "all"), (0, "")]
