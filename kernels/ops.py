"""The one place that chooses between implementations of an operation. Tensors and numbers only.

Everything that a model computes goes through here: kernels of our own where there are some for the device and dtype,
else torch operators, which run anywhere. `kernels.contract` says of each op whether rows depend on one another.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.cpu import builds, native
from sluice_server.kernels.cpu import sampling as native_sampling
from sluice_server.kernels.formats import weight_formats as kinds
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.layout import slots
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions
from sluice_server.kernels.reference import (
    adjust,
    attention,
    blocks,
    elementwise,
    inputs,
    moe,
    sampling,
    scores,
    speculation,
)
from sluice_server.kernels.reference.adjust import NO_CHANGES, LogitAdjustments
from sluice_server.kernels.reference.automaton import SuffixAutomaton
from sluice_server.kernels.reference.choice import ChosenTokens, ScoredRows
from sluice_server.kernels.reference.inputs import Inputs
from sluice_server.kernels.reference.moe import ExpertStack
from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.reference.scores import ScoreRequest, Scores


def pack_linear(
    weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, precise: bool = False, weights: str = ""
) -> PackedLinear:
    """Pack a weight [N, K] and bias [N] for the device they are on; `gated` if only `linear_gated` will use it. See
    `kernels.formats.weight_formats.pack`."""
    return kinds.pack(weight, bias, gated=gated, precise=precise, weights=weights)


def linear(x: Tensor, weight: PackedLinear) -> Tensor:
    """x [M, K] → [M, N]."""
    return weight.apply(x)


def linear_normed(x: Tensor, norm: Tensor | None, eps: float, weight: PackedLinear) -> Tensor:
    """RMSNorm(x [M, K]) through a linear → [M, N]; `norm` None when it is folded into the weight."""
    return weight.apply_normed(x, norm, eps)


def linear_gated(x: Tensor, norm: Tensor | None, eps: float, weight: PackedLinear, activation: str = "silu") -> Tensor:
    """activation(gate) · up of RMSNorm(x [M, K]), gate and up being the halves of the weight → [M, N / 2]; see
    `kernels.reference.elementwise.GATES`."""
    return weight.apply_gated(x, norm, eps, activation)


def linear_add_(
    residual: Tensor, x: Tensor, weight: PackedLinear, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """residual [M, N] += linear(x [M, K]), in place, or RMSNorm of that where there is a norm."""
    if norm is None:
        return weight.add_to(residual, x)
    return weight.add_normed_to(residual, x, norm, eps)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, H] for ids [T] → [T, H]."""
    if gpu.takes(table):
        found: Tensor = gpu.family("embedding").embedding(ids, table)
        return found
    return F.embedding(ids, table)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """RMSNorm over the last dimension, returned in `dtype`; see `kernels.reference.elementwise`."""
    chosen = gpu.family("norm") if gpu.takes(x) else elementwise
    normed: Tensor = chosen.rms_norm(x, weight, eps, dtype)
    return normed


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """x [M, N], contiguous, becomes cap · tanh(x / cap) in place."""
    if gpu.takes(x):
        capped: Tensor = gpu.family("activation").soft_cap_(x, cap)
        return capped
    if builds.is_available() and x.dtype is torch.float32:
        return native.soft_cap_(x, cap)
    return elementwise.soft_cap_(x, cap)


def rotate_and_write(heads: Tensor, cis: Tensor, cache: Tensor, meta: AttentionMetadata) -> None:
    """Rotate queries in place, put rotated keys and values into the cache. `heads` may keep its keys as they were.

    Args:
        heads: [T or more, heads + 2 kv_heads, D]: queries, keys, values; rows beyond `meta.num_tokens` are padding.
        cis: complex64 [T or more, 1, D/2]. Checkpoints rotate (i, i + D/2); loading permutes the rows of the
            projections so that pairs are neighbours.
        cache: [num_blocks, block_size, 2, kv_heads, slot_width(D)], in an order of bytes that `kernels.layout.layout`
            chooses; see `kernels.layout.slots`.
    """
    if gpu.takes(cache):
        numbers, scales = slots.parts(cache, heads.shape[2])
        gpu.family("kv_write").rotate_and_write(heads, cis, numbers, meta.write_slots, scales)
        return
    if native.takes(heads, cache):
        native.rotate_and_write(heads, cis, cache, meta)
        return
    kv_heads = cache.shape[3]
    elementwise.rope_(heads[:, :-kv_heads], cis)
    attention.write_kv(heads[:, -2 * kv_heads :].view(len(heads), 2, kv_heads, -1), cache, meta.write_slots)


def keeper(table: Tensor, column: int, width: int) -> Callable[[Tensor, Tensor, int], None]:
    """What puts `num` of contiguous states [T or more, width] into the rows `slots`, int64 [num], of a table [rows, W],
    rounded to its dtype: `width` columns from `column` on. A slot of -1, on a GPU only, is none."""
    if builds.is_available() and not gpu.takes(table) and table.dtype is torch.bfloat16:
        return native.keeper(table, column, width)

    def keep(states: Tensor, slots: Tensor, num: int) -> None:
        own, rows = table[:, column : column + width], states[:num].to(table.dtype)
        own[slots] = torch.where((slots >= 0)[:, None], rows, own[slots])

    return keep


def paged_attention(
    q: Tensor,
    cache: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    is_fixed: bool = False,
) -> Tensor:
    """Ragged queries q [T, heads, D] over the paged cache → [T, heads * D]; see `AttentionOptions`. `is_fixed`: by a
    schedule that leaves a row's bits to that row alone, where a GPU has another that is faster."""
    if gpu.takes(cache):
        numbers, scales = slots.parts(cache, q.shape[2])
        options = AttentionOptions(scale, window, cap, sinks, is_fixed)
        found: Tensor = gpu.family("attention").paged_attention(q, numbers, meta.ragged, options, scales)
        return found
    if native.takes(q, cache):
        return native.paged_attention(q, cache, meta, scale, window, cap, sinks)
    return attention.paged_attention(q, cache, meta, scale, window, cap, sinks)


def sample(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """One id per row of logits [R, V], and which rows are bad; see `kernels.reference.sampling.sample`."""
    if gpu.takes(logits):
        drawn: tuple[Tensor, Tensor] = gpu.family("sampling").sample(logits, rows)
        return drawn
    if native_sampling.takes(logits):
        ids = native_sampling.sample(logits, rows)
        return ids, ids < 0
    return sampling.sample(logits, rows)


def standing(sampled: Tensor, ids: Tensor, parents: Tensor, ends: Tensor) -> Tensor:
    """Which tokens of trees stand, in their order; see `kernels.reference.speculation.standing`."""
    chosen = gpu.family("speculation") if gpu.takes(sampled) else speculation
    found: Tensor = chosen.standing(sampled, ids, parents, ends)
    return found


def copy_blocks(sources: list[Tensor], targets: list[Tensor], pairs: Tensor) -> None:
    """Copy cache blocks of all layers; see `kernels.reference.blocks.copy_blocks`."""
    chosen = gpu.family("copy_blocks") if gpu.takes(pairs) else blocks
    chosen.copy_blocks(sources, targets, pairs)


def move_slots_(layers: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copy tokens to other slots of all layers; see `kernels.reference.blocks.move_slots_`."""
    blocks.move_slots_(layers, sources, targets)


def write_runs_(table: Tensor, rows: Tensor, firsts: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Change a table by short runs of numbers, in place; see `kernels.reference.inputs.write_runs_`."""
    chosen = gpu.family("inputs") if gpu.takes(table) else inputs
    chosen.write_runs_(table, rows, firsts, offsets, values)


def build_inputs(
    tokens: Tensor, tables: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, block_size: int, num_tokens: int
) -> Inputs:
    """A step's inputs from the state of its slots; see `kernels.reference.inputs.build_inputs`."""
    chosen = gpu.family("inputs") if gpu.takes(tokens) else inputs
    found: Inputs = chosen.build_inputs(tokens, tables, slots, starts, ends, block_size, num_tokens)
    return found


def route(logits: Tensor, per_token: int, *, renormalises: bool) -> tuple[Tensor, Tensor]:
    """The experts that each token takes, and their shares; see `kernels.reference.moe.route`."""
    return moe.route(logits, per_token, renormalises=renormalises)


def experts_mlp(
    x: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    experts: Tensor,
    shares: Tensor,
    activation: str = "silu",
    *,
    is_fixed: bool = False,
) -> Tensor:
    """The MLPs of the experts that each token chose, by its shares; see `kernels.reference.moe.experts_mlp`."""
    chosen = gpu.family("moe") if gpu.takes(x) else moe
    y: Tensor = chosen.experts_mlp(x, gate_up, down, experts, shares, activation, is_fixed=is_fixed)
    return y


def choose(logits: Tensor, rows: Rows, changes: LogitAdjustments, wanted: ScoredRows | None) -> ChosenTokens:
    """Change logits [R, V], which are overwritten, draw a token for each row, and score those that are wanted under
    their logits as they came."""
    if native_sampling.takes(logits):
        return native_sampling.choose(logits, rows, changes, wanted)
    raw = None if wanted is None else logits[wanted.at]
    if changes != NO_CHANGES:
        adjust_(logits, changes)
    ids, bad = sample(logits, rows)
    ids = ids.masked_fill(bad, -1)
    if wanted is None or raw is None:
        return ChosenTokens(ids, None)
    own = ids[wanted.at].clamp(min=0)
    return ChosenTokens(ids, score(raw, ScoreRequest(own, wanted.nums, wanted.rows, wanted.others, wanted.width)))


def adjust_(logits: Tensor, changes: LogitAdjustments) -> None:
    """Change single logits of [R, V] in place before sampling; see `kernels.reference.adjust.adjust_`."""
    chosen = gpu.family("adjust") if gpu.takes(logits) else adjust
    chosen.adjust_(logits, changes)


def score(logits: Tensor, asked: ScoreRequest) -> Scores:
    """Log probabilities and ranks under logits [L, V]; see `kernels.reference.scores.score`."""
    if gpu.takes(logits):
        found: Scores = gpu.family("scores").score(logits, asked)
        return found
    if native_sampling.takes(logits):
        return native_sampling.score(logits, asked)
    return scores.score(logits, asked)


def suffix_automaton() -> type[SuffixAutomaton]:
    """What finds where the end of a growing sequence of ids occurred before."""
    return native.automaton() if builds.is_available() else SuffixAutomaton
