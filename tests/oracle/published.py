"""Random checkpoints in the layouts of published quantisers, each with a float32 copy of the weights it represents.

Written after the formats' own packers, with none of our code.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracle.checkpoints import Shape, make_checkpoint

LARGEST = 448.0  # of float8_e4m3fn
SHAPE = Shape(hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=256)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
Tensors = dict[str, Tensor]


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 40]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "ignore": ["lm_head"]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def compressed(strategy: str) -> dict[str, Any]:
    """The compressed-tensors description of fp8 weights with a scale a `channel`, a `tensor` or a `block`."""
    side = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**side, "strategy": strategy, "group_size": None, "block_structure": [48, 40]}
    return compressed_of("float-quantized", weights, {**side, "strategy": "token", "dynamic": True})


def compressed_int8() -> dict[str, Any]:
    """The compressed-tensors description of W8A8 in integers."""
    side = {"num_bits": 8, "type": "int", "symmetric": True}
    return compressed_of(
        "int-quantized", {**side, "strategy": "channel"}, {**side, "strategy": "token", "dynamic": True}
    )


def compressed_packed(bits: int = 4, group: int = 128, **others: object) -> dict[str, Any]:
    """The compressed-tensors description of packed integers, W4A16 and W8A16."""
    size = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel", "group_size": None}
    return compressed_of("pack-quantized", {"num_bits": bits, "type": "int", "symmetric": True, **size, **others}, None)


def compressed_float4() -> dict[str, Any]:
    """The compressed-tensors description of NVFP4."""
    side = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return compressed_of("nvfp4-pack-quantized", side, {**side, "dynamic": "local"})


def compressed_of(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """compressed-tensors' configuration with one group."""
    weights = {"dynamic": False, "actorder": None, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


@dataclasses.dataclass(frozen=True)
class Published:
    """A quantised checkpoint, and a float32 one with the weights that it represents."""

    directory: Path
    meant: Path


def publish(
    path: Path, config: dict[str, Any], quantise: Callable[[Tensor], tuple[Tensors, Tensor]], shape: Shape = SHAPE
) -> Published:
    """Quantises every projection of a layer: `quantise` returns tensors by name suffix, and what they represent."""
    found = Published(make_checkpoint(path / "quantised", shape), make_checkpoint(path / "meant", shape))
    weights, meant = (load_file(one / "model.safetensors") for one in (found.directory, found.meant))
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        tensors, meant[name] = quantise(weights.pop(name))
        weights |= {name.replace(".weight", f".{end}"): tensor for end, tensor in tensors.items()}
    return _write(found, weights, meant, config)


def _write(found: Published, weights: Tensors, meant: Tensors, config: dict[str, Any]) -> Published:
    save_file({name: one.contiguous() for name, one in weights.items()}, found.directory / "model.safetensors")
    save_file({name: one.contiguous() for name, one in meant.items()}, found.meant / "model.safetensors")
    file = found.directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return found


def rounded(weight: Tensor, group: int, symmetric: bool, bits: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Levels [K, N], zero points and scales [⌈K / group⌉, N] of a weight [N, K], and what they represent, [N, K]."""
    middle, top = 1 << bits - 1, (1 << bits) - 1
    parts = []
    for columns in torch.split(weight.t(), group):
        if symmetric:
            scales = (columns.abs().amax(0) / (middle - 0.5)).half()
            zeros = torch.full(scales.shape, middle)
        else:
            low, high = columns.amin(0).clamp(max=0), columns.amax(0).clamp(min=0)
            scales = ((high - low) / top).half()
            zeros = (-low / scales.float()).round().clamp(1, top).long()
        levels = ((columns / scales.float()).round() + zeros).clamp(0, top).long()
        parts.append((levels, zeros, scales, (levels - zeros) * scales.float()))
    levels, meant = (torch.cat([part[at] for part in parts]) for at in (0, 3))
    zeros, scales = (torch.stack([part[at] for part in parts]) for at in (1, 2))
    return levels, zeros, scales, meant.t()


def words(numbers: list[Tensor]) -> Tensor:
    """int32 of 8 numbers 0 … 15 or 4 numbers 0 … 255, the first lowest."""
    whole = sum(one.long() << 32 // len(numbers) * at for at, one in enumerate(numbers))
    assert isinstance(whole, Tensor)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def across(x: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Neighbouring columns in a word."""
    return words([x[:, at :: len(order)] for at in order])


def awq(weight: Tensor, group: int = 128) -> tuple[Tensors, Tensor]:
    """AutoAWQ's GEMM layout: [K, N / 8], columns interleaved."""
    levels, zeros, scales, meant = rounded(weight, group if group > 0 else weight.shape[1], symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": across(levels, order), "qzeros": across(zeros, order), "scales": scales}, meant


def gptq(
    weight: Tensor, group: int = 128, symmetric: bool = True, bits: int = 4, mixed: bool = False, shift: int = 1
) -> tuple[Tensors, Tensor]:
    """As AutoGPTQ has it: [K · bits / 32, N], zero points less `shift`, the group of each input.

    With `mixed`, inputs are not in the order of their groups, as act-order leaves them.
    """
    inputs, num = weight.shape[1], 32 // bits
    to = torch.randperm(inputs, generator=torch.Generator().manual_seed(0)) if mixed else torch.arange(inputs)
    levels, zeros, scales, meant = rounded(weight[:, to], group, symmetric, bits)
    back = to.argsort()
    levels, meant, order = levels[back], meant[:, back], (torch.arange(inputs) // group).int()[back]
    tensors = {"qweight": words([levels[at::num] for at in range(num)]), "scales": scales, "g_idx": order}
    return {**tensors, "qzeros": across(zeros - shift, tuple(range(num)))}, meant


def packed(
    weight: Tensor, group: int = 128, symmetric: bool = True, bits: int = 4, mixed: bool = False
) -> tuple[Tensors, Tensor]:
    """As compressed-tensors packs integers: [N, K · bits / 32], scales [N, groups], zero points packed along rows."""
    inputs, order = weight.shape[1], tuple(range(32 // bits))
    to = torch.randperm(inputs, generator=torch.Generator().manual_seed(0)) if mixed else torch.arange(inputs)
    levels, zeros, scales, meant = rounded(weight[:, to], group if group > 0 else inputs, symmetric, bits)
    back = to.argsort()
    tensors = {"weight_packed": across(levels[back].t(), order), "weight_scale": scales.t()}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    if not symmetric:
        tensors["weight_zero_point"] = across(zeros, order).t()
    if mixed:
        tensors["weight_g_idx"] = (torch.arange(inputs) // group).int()[back]
    return tensors, meant[:, back]


def int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Integers of 8 bits with a scale a row, as compressed-tensors has W8A8."""
    scales = weight.abs().amax(1, keepdim=True) / 127.5
    small = (weight / scales).round().clamp(-128, 127)
    return {"weight": small.to(torch.int8), "weight_scale": scales}, small * scales


def fp8_blocks(
    weight: Tensor, name: str = "weight_scale_inv", sides: tuple[int, int] = (48, 40)
) -> tuple[Tensors, Tensor]:
    """float8 with a scale a block, the last ones smaller."""
    small, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty([-(-size // side) for size, side in zip(weight.shape, sides, strict=True)])
    for i, j in itertools.product(*map(range, scales.shape)):
        at = tuple(slice(one * side, (one + 1) * side) for one, side in zip((i, j), sides, strict=True))
        scales[i, j] = weight[at].abs().max() / LARGEST
        small[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
        meant[at] = small[at].float() * scales[i, j]
    return {"weight": small, name: scales}, meant


FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])  # of 4 bits, by their bits


def float4(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest floats of 4 bits of [N, K]: two in a byte, the first lower, and the numbers represented."""
    bits = (values.unsqueeze(2) - FLOATS).abs().argmin(2)
    return (bits[:, ::2] | bits[:, 1::2] << 4).to(torch.uint8), FLOATS[bits]


def nvfp4(weight: Tensor, names: tuple[str, str] = ("weight", "weight_scale_2")) -> tuple[Tensors, Tensor]:
    """Floats of 4 bits in groups of 16 with a float8 scale, and one factor; compressed-tensors stores its inverse."""
    groups = weight.unflatten(1, (-1, 16))
    factor = weight.abs().max() / (6 * LARGEST)
    scales = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
    wide = (scales.float() * factor).unsqueeze(2)
    small, values = float4((groups / wide).nan_to_num().flatten(1))
    stored = (1 / factor if names[1] == "weight_global_scale" else factor).view(1)
    meant = (values.unflatten(1, (-1, 16)) * wide).flatten(1)
    return {names[0]: small, "weight_scale": scales, names[1]: stored}, meant


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [.., K / 32, 16] and exponents [.., K / 32] of a weight [.., K], and the numbers represented."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    wide = exponents.exp2().unsqueeze(-1)
    small, values = float4((groups / wide).flatten(0, -2))
    meant = (values.view(groups.shape) * wide).flatten(-2)
    return small.view(*groups.shape[:-1], 16), (exponents + 127).to(torch.uint8), meant


def publish_mxfp4(path: Path, shape: Shape) -> Published:
    """A gpt-oss whose experts are stored as it is published: blocks and scales, inputs last."""
    found = Published(make_checkpoint(path / "quantised", shape), make_checkpoint(path / "meant", shape))
    weights, meant = (load_file(one / "model.safetensors") for one in (found.directory, found.meant))
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, values = mxfp4(weights.pop(name).transpose(1, 2))
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = values.transpose(1, 2)
    return _write(found, weights, meant, MXFP4)


def fp8(weight: Tensor, per_row: bool = True, shape: tuple[int, ...] | None = None) -> tuple[Tensors, Tensor]:
    """float8 with a scale per row [N, 1], or one in all."""
    peak = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().max().view(1, 1)
    scales = peak / LARGEST
    small = (weight / scales).to(torch.float8_e4m3fn)
    meant = small.float() * scales
    return {"weight": small, "weight_scale": scales if shape is None else scales.view(shape)}, meant
