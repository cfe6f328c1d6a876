"""Rotary position embedding tables (Su et al. 2021) with the scalings that checkpoints use.

The frequencies equal `transformers`' `ROPE_INIT_FUNCTIONS`: default, linear, llama3, yarn (Peng et al. 2023).
"""

import math

import torch
from torch import Tensor

from sluice_server.engine.models.by_layer import RopeConfig
from sluice_server.engine.models.config import ModelConfig

PART = 1024  # positions computed at a time


def rope_table(config: ModelConfig, num_positions: int, device: torch.device, rope: RopeConfig | None = None) -> Tensor:
    """Returns complex64 [num_positions, head_dim / 2]: scale · exp(i · position · frequency).

    `rope` None is the model's own.
    """
    frequencies, scale = _frequencies(config, rope or config.rope)
    table = torch.empty(num_positions, len(frequencies), dtype=torch.complex64)
    scales = torch.full((min(num_positions, PART), len(frequencies)), scale)
    # In parts that fit the CPU's cache: the table of a long context takes gigabytes.
    for first in range(0, num_positions, PART):
        part = table[first : first + PART]
        angles = torch.outer(torch.arange(first, first + len(part), dtype=torch.float32), frequencies)
        torch.polar(scales[: len(part)], angles, out=part)
    return table.to(device)


def _frequencies(config: ModelConfig, rope: RopeConfig) -> tuple[Tensor, float]:
    dim = config.head_dim
    base = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.kind == "linear":
        return base / rope.get("factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope, config.context_length), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope, dim, config.context_length)
    return base, 1.0


def _llama3(base: Tensor, rope: RopeConfig, context_length: int) -> Tensor:
    """Divides the frequencies of long wavelengths by the factor, keeps short ones, interpolates in between."""
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    original = rope.get("original_max_position_embeddings", float(context_length))
    wavelengths = 2 * math.pi / base
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * base / rope.get("factor") + smooth * base
    scaled = torch.where(wavelengths > original / low, base / rope.get("factor"), base)
    is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(is_between, between, scaled)


def _yarn(base: Tensor, rope: RopeConfig, dim: int, context_length: int) -> tuple[Tensor, float]:
    """Interpolates NTK-by-parts; also returns the attention temperature as a scale of the table."""
    factor = rope.get("factor")
    original = rope.get("original_max_position_embeddings", float(context_length))

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.get("beta_fast", 32.0)), correction_dim(rope.get("beta_slow", 1.0))
    if rope.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = base / factor * ramp + base * (1 - ramp)
    return frequencies, rope.get("attention_factor", _yarn_scale(rope, factor))


def _yarn_scale(rope: RopeConfig, factor: float) -> float:
    def mscale(scale: float, by: float) -> float:
        return 0.1 * by * math.log(scale) + 1.0 if scale > 1 else 1.0

    named = dict(rope.parameters)
    if named.get("mscale") and named.get("mscale_all_dim"):
        return mscale(factor, named["mscale"]) / mscale(factor, named["mscale_all_dim"])
    return mscale(factor, 1.0)
