"""The memory of a model as it is planned: by hand for the demo, and beside what an engine allocates."""

from pathlib import Path

import pytest
import torch

import sluice_server.demo
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.headers import read_shapes
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.worker.startup.formats import Formats
from sluice_server.engine.worker.startup.planned import layer_bytes
from sluice_server.services.checks.planned import AskedPlan, budget_of, front_bytes, with_plans
from sluice_server.services.config import ServiceConfig
from sluice_server.services.engine.planning import plan
from sluice_server.services.memory.control_group import ControlGroup
from sluice_server.services.process.model_table import LaneEntry, PlannedBytes, with_options

TARGET = Path(sluice_server.demo.__file__).parent / "target"
GIB = 1 << 30
CONFIG = EngineConfig(dtype="float32", kv_cache_tokens=4096)


def planned(config: EngineConfig = CONFIG, engines: int = 1, budget: int = 64 * GIB) -> PlannedBytes:
    return plan(AskedPlan(config, str(TARGET), 1 << 20, engines, 0, budget)).planned


def test_weights_are_those_of_the_files_and_the_cache_is_what_an_engine_allocates() -> None:
    found = planned()
    model = load_model(TARGET, config := read_served(TARGET), torch.float32, torch.device("cpu"))
    tied = config.vocab_size * config.hidden_size if config.tied_embeddings else 0
    assert found.weights == 4 * (model.num_parameters + tied)
    block = CONFIG.block_size
    cache = model.new_cache(4096 // block, block)
    one = sum(layer.nbytes // layer.shape[0] for layer in cache)  # the block that is never written
    assert found.cache == sum(layer.nbytes for layer in cache) - one and found.cache_tokens == 4096


def test_what_settings_change() -> None:
    plain, other = planned(), planned(engines=2)
    assert (other.weights, other.cache, other.workspace) == (2 * plain.weights, 2 * plain.cache, 2 * plain.workspace)
    tiers = planned(EngineConfig(dtype="float32", kv_cache_tokens=4096, kv_cache_max_tokens=8192, host_cache_bytes=GIB))
    assert (tiers.cache, tiers.cache_tokens, tiers.tiers) == (2 * plain.cache, 4096, GIB)
    assert planned(EngineConfig(quantization="int4", kv_cache_tokens=4096)).weights < plain.weights / 2
    layers = layer_bytes(TARGET, read_served(TARGET), Formats(torch.float32, "", torch.float32))
    offloading = EngineConfig(dtype="float32", kv_cache_tokens=4096, weights_offload_bytes=sum(layers))
    assert plain.weights - planned(offloading).weights == sum(layers) - 2 * max(layers) > 0
    beyond = EngineConfig(weights_offload_bytes=1 << 40)
    assert "are more than the" in plan(AskedPlan(beyond, str(TARGET), 1 << 20, 1, 0, GIB)).message
    drafting = EngineConfig(dtype="float32", kv_cache_tokens=4096, speculation="draft", draft_model="demo")
    assert plain.weights < planned(drafting).weights < 2 * plain.weights


def test_a_cache_that_sizes_itself_takes_a_quarter_of_the_budget_at_most_and_the_engine_gets_that_size() -> None:
    found = planned(EngineConfig(dtype="float32", max_num_seqs=4096), budget=GIB // 4)
    assert 0.24 * GIB / 4 <= found.cache <= 0.25 * GIB / 4
    engine, _ = with_options(EngineConfig(), ServiceConfig(), LaneEntry("x", "/x", planned=found))
    assert engine.kv_cache_tokens == found.cache_tokens
    own = LaneEntry("x", "/x", options={"kv_cache_tokens": 16}, planned=found)
    assert with_options(EngineConfig(), ServiceConfig(), own)[0].kv_cache_tokens == 16


def test_a_process_of_its_own_plans_and_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((TARGET / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    good = LaneEntry("x", str(TARGET), options={"kv_cache_tokens": 4096})
    with pytest.raises(ServiceError, match="is corrupt or cut short"):
        with_plans(EngineConfig(), ServiceConfig(), [good, LaneEntry("y", str(tmp_path))])


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b'\x08\0\0\0\0\0\0\0{"a":{}}'])
def test_a_header_that_is_none_names_its_file(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(header)
    with pytest.raises(ServiceError, match=r"model\.safetensors"):
        read_shapes(tmp_path)


def test_the_budget_is_the_setting_else_the_limit_of_the_control_group() -> None:
    assert budget_of(ServiceConfig(memory_budget=5)) == 5 and budget_of(ServiceConfig()) == ControlGroup().read().limit
    assert front_bytes(ServiceConfig(gateways=2, http="x")) > front_bytes(ServiceConfig(gateways=2))
