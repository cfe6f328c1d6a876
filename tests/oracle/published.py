"""Random checkpoints in the layouts of published quantisers, each with a float32 copy of the weights it represents.

Written after the formats' own packers, with none of our code.
"""

import dataclasses
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


def compressed(strategy: str) -> dict[str, Any]:
    """The compressed-tensors description of fp8 weights with one scale per `channel` or per `tensor`."""
    side = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**side, "strategy": strategy, "dynamic": False, "group_size": None}
    activations = {**side, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
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
        weights |= {name.replace(".weight", f".{end}"): tensor.contiguous() for end, tensor in tensors.items()}
    save_file(weights, found.directory / "model.safetensors", {"format": "pt"})
    save_file({name: one.contiguous() for name, one in meant.items()}, found.meant / "model.safetensors")
    file = found.directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    return found


def rounded(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Levels [K, N], zero points and scales [K / group, N] of a weight [N, K], and the numbers represented, [N, K]."""
    columns = weight.t().reshape(-1, group, len(weight))
    if symmetric:
        scales = (columns.abs().amax(1) / 7.5).half()
        zeros = torch.full(scales.shape, 8)
    else:
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15).long()
    wide = scales.float()
    levels = ((columns / wide[:, None]).round() + zeros[:, None]).clamp(0, 15).long()
    meant = ((levels - zeros[:, None]) * wide[:, None]).reshape(weight.shape[1], -1).t()
    return levels.reshape(weight.shape[1], -1), zeros, scales, meant


def words(nibbles: list[Tensor]) -> Tensor:
    """int32 words of eight numbers 0 … 15, the first one lowest."""
    whole = sum(one.long() << 4 * at for at, one in enumerate(nibbles))
    assert isinstance(whole, Tensor)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).int()


def across(x: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight neighbouring columns per word."""
    return words([x[:, at::8] for at in order])


def awq(weight: Tensor, group: int = 128) -> tuple[Tensors, Tensor]:
    """AutoAWQ's GEMM layout: [K, N / 8], columns interleaved."""
    levels, zeros, scales, meant = rounded(weight, group if group > 0 else weight.shape[1], symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": across(levels, order), "qzeros": across(zeros, order), "scales": scales}, meant


def gptq(weight: Tensor, group: int = 128, symmetric: bool = True) -> tuple[Tensors, Tensor]:
    """AutoGPTQ's layout: [K / 8, N], zero points less one, the group of each input."""
    levels, zeros, scales, meant = rounded(weight, group, symmetric)
    order = (torch.arange(len(levels)) // group).int()
    tensors = {"qweight": words([levels[at::8] for at in range(8)]), "qzeros": across(zeros - 1), "scales": scales}
    return {**tensors, "g_idx": order}, meant


def fp8(weight: Tensor, per_row: bool = True, shape: tuple[int, ...] | None = None) -> tuple[Tensors, Tensor]:
    """float8 with a scale per row [N, 1], or one in all."""
    peak = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().max().view(1, 1)
    scales = peak / LARGEST
    small = (weight / scales).to(torch.float8_e4m3fn)
    meant = small.float() * scales
    return {"weight": small, "weight_scale": scales if shape is None else scales.view(shape)}, meant
