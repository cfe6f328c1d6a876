"""A rank's slices of every layout and format are the whole tensor's; what a format cannot cut is refused by name."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import ModelConfig, read_config
from sluice_server.engine.models.gguf.checkpoint import GgufCheckpoint
from sluice_server.engine.models.loading import open_checkpoint
from sluice_server.engine.models.registry import traits_of
from sluice_server.engine.models.weights import Checkpoint, WeightSource
from sluice_server.engine.parallel.cuts import config_of_rank, cuts_of
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sharded import ShardedWeights
from sluice_server.kernels.formats.packed_weights import dequantise
from tests.engine.models.test_stored import FORMS
from tests.oracle import published
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.gguf_files import write_gguf

CPU = torch.device("cpu")
SHAPES = {
    "llama": Shape("llama", options=(("attention_bias", True), ("mlp_bias", True))),
    "qwen2": Shape("qwen2"),
    "olmo2": Shape("olmo2"),
    "phi3": Shape("phi3", hidden=64),
    "qwen3_moe": Shape(
        "qwen3_moe", options=(("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 40))
    ),
    "qwen3_moe-fused": Shape(
        "qwen3_moe",
        is_fused=True,
        options=(("num_experts", 4), ("num_experts_per_tok", 2), ("moe_intermediate_size", 40)),
    ),
    "qwen2_moe": Shape(
        "qwen2_moe",
        options=(("num_experts", 4), ("moe_intermediate_size", 40), ("shared_expert_intermediate_size", 56)),
    ),
    "gpt_oss": Shape("gpt_oss", head_dim=32, options=(("num_local_experts", 4), ("num_experts_per_tok", 2))),
}


def source_of(directory: Path, config: ModelConfig) -> Checkpoint | GgufCheckpoint:
    return open_checkpoint(directory, config, torch.float32, CPU)


def of_ranks(source: WeightSource, config: ModelConfig, size: int, **options: bool) -> list[ShardedWeights]:
    shapes = [ParallelShape(tensor_size=size, rank=rank, **options) for rank in range(size)]
    for shape in shapes:
        shape.check(config)
    return [ShardedWeights(source, config, traits_of(config), shape) for shape in shapes]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", list(SHAPES))
def test_slices_of_all_ranks_are_the_whole_tensor(name: str, size: int, tmp_path: Path) -> None:
    """But for key/value heads of several ranks every number is read once, in each of its tensors that are cut."""
    make_checkpoint(tmp_path, SHAPES[name])
    config, tensors = read_config(tmp_path), load_file(tmp_path / "model.safetensors")
    source, traits = source_of(tmp_path, config), traits_of(config)
    ranks = of_ranks(source, config, size)
    cuts = [cuts_of(config, traits, ParallelShape(tensor_size=size, rank=rank)) for rank in range(size)]
    for tensor_name, tensor in tensors.items():
        if tensor_name not in cuts[0]:
            assert "_proj" not in tensor_name or tensor_name.endswith(("o_proj.bias", "down_proj.bias")), tensor_name
            continue
        seen = torch.zeros(tensor.shape)
        for rank, own in zip(ranks, cuts, strict=True):
            cut = own[tensor_name]
            part = rank.get(tensor_name, tuple(sum(span.size for span in spans) for spans in cut))
            at = [torch.cat([torch.arange(span.start, span.stop) for span in spans]) for spans in cut]
            assert torch.equal(part, tensor[torch.meshgrid(*at, indexing="ij")]), tensor_name
            seen[torch.meshgrid(*at, indexing="ij")] += 1
        shared = size // config.num_kv_heads if any(f"self_attn.{one}" in tensor_name for one in ("k_", "v_")) else 1
        if not tensor_name.endswith(("qkv_proj.weight", "down_proj_bias")):  # all keys and values, and a whole bias
            assert bool((seen == max(shared, 1)).all()), tensor_name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", list(FORMS))
def test_quantised_slices_are_those_of_the_whole(form: str, size: int, tmp_path: Path) -> None:
    fields, quantise, _ = FORMS[form]
    directory = published.publish(tmp_path, fields, quantise).directory
    config = read_config(directory)
    source = source_of(directory, config)
    for rank, own in enumerate(of_ranks(source, config, size)):
        shape = config_of_rank(config, ParallelShape(tensor_size=size, rank=rank))
        inner, queries = shape.intermediate_size, shape.num_heads * 32
        assert_slice(own, source, "mlp.up_proj", (inner, 128), (slice(rank * inner, (rank + 1) * inner), slice(None)))
        columns = slice(None), slice(rank * inner, (rank + 1) * inner)
        assert_slice(own, source, "mlp.down_proj", (128, inner), columns, (128, 256))
        columns = slice(None), slice(rank * queries, (rank + 1) * queries)
        assert_slice(own, source, "self_attn.o_proj", (128, queries), columns, (128, 128))
        head = slice(rank * 2 // size * 32, (rank * 2 // size + shape.num_kv_heads) * 32)
        assert_slice(own, source, "self_attn.k_proj", (shape.num_kv_heads * 32, 128), (head, slice(None)), (64, 128))


def assert_slice(
    own: WeightSource,
    source: WeightSource,
    name: str,
    sizes: tuple[int, int],
    part: tuple[slice, slice],
    whole: tuple[int, int] = (256, 128),
) -> None:
    found, wanted = own.stored(f"model.layers.1.{name}", *sizes), source.stored(f"model.layers.1.{name}", *whole)
    assert found is not None and wanted is not None
    assert torch.equal(dequantise(found), dequantise(wanted)[part]), name


@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16", "gptq-8"])
def test_a_cut_within_a_group_is_refused_by_name(form: str, tmp_path: Path) -> None:
    """Three groups of 128 inputs are not for two ranks."""
    fields, quantise, _ = FORMS[form]
    shape = dataclasses.replace(published.SHAPE, intermediate=384)
    directory = published.publish(tmp_path, fields, quantise, shape).directory
    config = read_config(directory)
    first = of_ranks(source_of(directory, config), config, 2)[0]
    with pytest.raises(
        ServiceError, match=r"--tensor-parallel-size: model\.layers\.0\.mlp\.down_proj: inputs 0 to 191 of 384"
    ):
        first.stored("model.layers.0.mlp.down_proj", 128, 192)


@pytest.mark.parametrize(
    ("width", "said"), [(44, r"has shape \[48, 44\]"), (0, "no safetensors file holds the tensor")]
)
def test_a_checkpoint_that_lacks_a_slice_is_refused_by_every_rank(width: int, said: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama"])
    config, tensors = read_config(tmp_path), load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    whole = tensors.pop(name)
    if width:
        tensors[name] = whole[:, :width].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for rank in of_ranks(source_of(tmp_path, config), config, 2):
        with pytest.raises(ServiceError, match=said) as caught:
            rank.get(name, (48, 44))
        assert name in caught.value.message


def test_what_is_no_number_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama"])
    config, tensors = read_config(tmp_path), load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 60] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    first, second = of_ranks(source_of(tmp_path, config), config, 2)
    assert first.get(name, (48, 44)).isfinite().all()
    with pytest.raises(ServiceError, match=r"holds nan at \[3, 60\]"):
        second.get(name, (48, 44))


def test_blocks_of_experts_are_cut(tmp_path: Path) -> None:
    shape = Shape("gpt_oss", hidden=64, head_dim=32, intermediate=128, options=SHAPES["gpt_oss"].options)
    directory = published.publish_mxfp4(tmp_path, shape).directory
    config = read_config(directory)
    source, at = source_of(directory, config), "model.layers.0.mlp.experts"
    whole = source.stored_experts(f"{at}.gate_up_proj", (4, 256, 64))
    downs = source.stored_experts(f"{at}.down_proj", (4, 64, 128))
    assert whole is not None and downs is not None
    for rank, own in enumerate(of_ranks(source, config, 2)):
        part, down = (
            own.stored_experts(f"{at}.gate_up_proj", (4, 128, 64)),
            own.stored_experts(f"{at}.down_proj", (4, 64, 64)),
        )
        assert part is not None and down is not None
        for found, wanted in zip(part, whole, strict=True):
            assert torch.equal(dequantise(found), dequantise(wanted)[rank * 128 : (rank + 1) * 128])
        for found, wanted in zip(down, downs, strict=True):
            assert torch.equal(dequantise(found), dequantise(wanted)[:, rank * 64 : (rank + 1) * 64])
    with pytest.raises(
        ServiceError, match=r"--tensor-parallel-size: .*down_proj: inputs 0 to 79 of 160 cut groups of 32"
    ):
        wide = dataclasses.replace(config.experts, intermediate_size=160) if config.experts else None
        odd = of_ranks(source, dataclasses.replace(config, experts=wide), 2)[0]
        odd.stored_experts(f"{at}.down_proj", (4, 64, 80))


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_blocks_of_gguf_are_cut(kind: str, tmp_path: Path) -> None:
    shape = Shape(hidden=256, heads=4, kv_heads=2, head_dim=128, intermediate=512)
    config = read_config(make_checkpoint(tmp_path, shape))
    source = GgufCheckpoint([write_gguf(tmp_path, tmp_path / "x.gguf", kind)], torch.float32, CPU)
    for rank, own in enumerate(of_ranks(source, config, 2)):
        for name, sizes, cut in (
            ("self_attn.q_proj", (512, 256), 0),
            ("self_attn.k_proj", (256, 256), 0),
            ("mlp.down_proj", (256, 512), 1),
        ):
            half = tuple(size // 2 if dim == cut else size for dim, size in enumerate(sizes))
            full = f"model.layers.0.{name}"
            wanted = values_of(source, full, sizes).chunk(2, cut)[rank]
            assert torch.equal(values_of(own, full, half), wanted), name
    if kind == "Q4_K":
        with pytest.raises(
            ServiceError, match=r"--tensor-parallel-size: .*o_proj: inputs 0 to 127 of 512 begin or end"
        ):
            of_ranks(source, config, 4)[0].stored("model.layers.0.self_attn.o_proj", 256, 128)


def values_of(source: WeightSource, name: str, shape: Sequence[int]) -> Tensor:
    packed = source.stored(name, *shape)
    return source.get(f"{name}.weight", tuple(shape)) if packed is None else dequantise(packed)
