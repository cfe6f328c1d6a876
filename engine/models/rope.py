"""Rotary position embedding tables (Su et al. 2021) with the scalings that checkpoints use.

The frequencies equal `transformers`' `ROPE_INIT_FUNCTIONS`: default, linear, llama3, yarn (Peng et al. 2023), longrope
(Ding et al. 2024).
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.engine.models.by_layer import ORIGINAL, RopeConfig
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.traits import ArchitectureTraits

PART = 1024  # positions computed at a time


class Rotations:
    """What turns the queries and keys of a model, by position.

    Attributes:
        num_positions: that exist.
        axes: int64 [head_dim / 2], which direction's position turns each frequency: time, row or column; None where
            positions have one direction.
    """

    def __init__(
        self, config: ModelConfig, traits: ArchitectureTraits, num_positions: int, device: torch.device
    ) -> None:
        self.num_positions = num_positions
        self.axes = section_axes(config.rope, config.head_dim // 2, device)
        self._tables = rotary_tables(config, traits, num_positions, device)

    def of(self, positions: Tensor, turned: Sequence[tuple[int, Tensor]] = ()) -> list[Tensor]:
        """Returns the rows complex64 [T, 1, head_dim / 2] of each table, in the order of `rotary_index`, for positions
        int64 [T]. `turned`: positions [3, N] of some tokens, with the index of the first."""
        if not turned:
            return [table[positions] for table in self._tables]
        assert self.axes is not None, "positions have one direction"
        three = positions.repeat(3, 1)
        for first, own in turned:
            three[:, first : first + own.shape[1]] = own
        at, frequencies = three[self.axes].t().contiguous(), torch.arange(len(self.axes), device=self.axes.device)
        return [table[at, 0, frequencies].unsqueeze(1) for table in self._tables]


def section_axes(rope: RopeConfig, num: int, device: torch.device) -> Tensor | None:
    """Returns which direction's position turns each of `num` frequencies, int64; None where there is one direction.

    Sections lie one behind the other, or rows and columns take turns with time, as far as their sections go.
    """
    if not rope.sections:
        return None
    axes = torch.arange(3).repeat_interleave(torch.tensor(rope.sections))
    if rope.interleaved:
        axes = torch.zeros(num, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * rope.sections[axis] : 3] = axis
    return axes.to(device)


def rotary_tables(
    config: ModelConfig, traits: ArchitectureTraits, num_positions: int, device: torch.device
) -> list[Tensor]:
    """Returns the rotary tables [num_positions, 1, head_dim / 2], in the order of `rotary_index`."""
    ropes = (config.rope,) if config.local_rope is None else (config.rope, config.local_rope)
    tables = [rope_table(config, num_positions, device, rope) for rope in ropes]
    if not all(traits.rotated):
        tables.append(no_rotation(config, num_positions, device))
    return [table.unsqueeze(1) for table in tables]


def rope_table(config: ModelConfig, num_positions: int, device: torch.device, rope: RopeConfig | None = None) -> Tensor:
    """Returns complex64 [num_positions, head_dim / 2]: scale · exp(i · position · frequency).

    `rope` None is the model's own. Numbers of a head that are not rotated have the factor 1, as of frequency 0.
    """
    rotated, scale = _frequencies(config, rope or config.rope, num_positions)
    frequencies = F.pad(rotated, (0, config.head_dim // 2 - len(rotated)))
    table = torch.empty(num_positions, len(frequencies), dtype=torch.complex64)
    scales = torch.ones(min(num_positions, PART), len(frequencies))
    scales[:, : len(rotated)] = scale
    # In parts that fit the CPU's cache: the table of a long context takes gigabytes.
    for first in range(0, num_positions, PART):
        part = table[first : first + PART]
        angles = torch.outer(torch.arange(first, first + len(part), dtype=torch.float32), frequencies)
        torch.polar(scales[: len(part)], angles, out=part)
    return table.to(device)


def no_rotation(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """Returns the table of layers without positions, which takes no memory: every factor is 1."""
    one = torch.ones(1, config.head_dim // 2, dtype=torch.complex64, device=device)
    return one.expand(num_positions, -1)


def uses_long_factors(config: ModelConfig, num_positions: int) -> bool:
    """Returns whether longrope's factors for long contexts are in use: where more positions are served than the model
    was first trained with. One set serves all requests, because they share cached keys."""
    original = config.rope.get(ORIGINAL, float(config.context_length))
    return config.rope.kind == "longrope" and num_positions > original


def _frequencies(config: ModelConfig, rope: RopeConfig, num_positions: int) -> tuple[Tensor, float]:
    dim = int(config.head_dim * rope.partial)
    base = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.kind == "linear":
        return base / rope.get("factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(base, rope, config.context_length), 1.0
    if rope.kind == "yarn":
        return _yarn(base, rope, dim, config.context_length)
    if rope.kind == "longrope":
        return _longrope(base, rope, config.context_length, num_positions)
    return base, 1.0


def _longrope(base: Tensor, rope: RopeConfig, context_length: int, num_positions: int) -> tuple[Tensor, float]:
    """Divides each frequency by its own factor; also returns the attention temperature as a scale of the table."""
    original = rope.get(ORIGINAL, float(context_length))
    factors = rope.long_factors if num_positions > original else rope.short_factors
    factor = rope.get("factor", context_length / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return base / torch.tensor(factors), rope.get("attention_factor", scale)


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
