"""Chooses the implementation of every tensor operation that a model uses.

Takes and returns tensors and numbers. Uses this package's own kernels (Triton on CUDA, C++ on CPU) where they support
the device and dtype, and torch operators, which run on any device, elsewhere. `kernels.contract` states for each
operation whether the rows of its result depend on one another.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.cpu import builds, native, native_encoders
from sluice_server.kernels.cpu import sampling as native_sampling
from sluice_server.kernels.formats.linear import PackedLinear
from sluice_server.kernels.layout import slots
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions
from sluice_server.kernels.reference import (
    adjust,
    attention,
    blocks,
    elementwise,
    encoders,
    inputs,
    moe,
    peer_sums,
    sampling,
    scores,
    speculation,
)
from sluice_server.kernels.reference.adjust import NO_CHANGES, LogitAdjustments, TokenMask
from sluice_server.kernels.reference.automaton import SuffixAutomaton
from sluice_server.kernels.reference.choice import ChosenTokens, ScoredRows
from sluice_server.kernels.reference.elementwise import HeadNorms
from sluice_server.kernels.reference.inputs import StepInputs
from sluice_server.kernels.reference.moe import ExpertStack
from sluice_server.kernels.reference.peer_sums import PeerBuffers
from sluice_server.kernels.reference.sampling import Rows
from sluice_server.kernels.reference.scores import ScoreRequest, Scores


def linear(x: Tensor, weight: PackedLinear) -> Tensor:
    """Multiplies x [M, K] by a packed weight and adds its bias; returns [M, N]."""
    return weight.apply(x)


def linear_normed(x: Tensor, norm: Tensor | None, eps: float, weight: PackedLinear) -> Tensor:
    """Applies a linear layer to RMSNorm(x [M, K]); returns [M, N]. `norm` is None when it is folded into the weight."""
    return weight.apply_normed(x, norm, eps)


def linear_normed_wide(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    weight: PackedLinear,
    out: Tensor | None = None,
    wanted: TokenMask | None = None,
) -> Tensor:
    """Computes `linear_normed` in float32: [M, N], in `out` if it is given. `wanted`: of the rows that it lists, only
    these columns; others may hold anything."""
    return weight.wide_normed(x, norm, eps, out, wanted)


def linear_gated(x: Tensor, norm: Tensor | None, eps: float, weight: PackedLinear, activation: str = "silu") -> Tensor:
    """Returns activation(gate) · up [M, N / 2]; gate and up are the halves of the linear layer of RMSNorm(x [M, K]).

    See `kernels.reference.elementwise.GATES` for the activations.
    """
    return weight.apply_gated(x, norm, eps, activation)


def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Returns activation(first half) · second half of [M, 2 N]: [M, N]."""
    gates = gpu.family("activation").GATES if gpu.takes(gate_up) else elementwise.GATES
    gated: Tensor = gates[activation](gate_up)
    return gated


def linear_add_(
    residual: Tensor, x: Tensor, weight: PackedLinear, norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Adds linear(x [M, K]) to residual [M, N] in place; if `norm` is given, adds RMSNorm of the linear's output."""
    if norm is None:
        return weight.add_to(residual, x)
    return weight.add_normed_to(residual, x, norm, eps)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Returns the rows of table [V, H] for ids [T]: [T, H]."""
    if gpu.takes(table):
        found: Tensor = gpu.family("embedding").embedding(ids, table)
        return found
    return F.embedding(ids, table)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Returns RMSNorm over the last dimension, in `dtype`; see `kernels.reference.elementwise.rms_norm`."""
    chosen = gpu.family("norm") if gpu.takes(x) else elementwise
    normed: Tensor = chosen.rms_norm(x, weight, eps, dtype)
    return normed


def add_rms_norm_(
    residual: Tensor, x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype | None = None
) -> Tensor:
    """Adds x to residual in place, and returns RMSNorm of the sum; see `kernels.reference.elementwise`."""
    chosen = gpu.family("norm") if gpu.takes(residual) else elementwise
    normed: Tensor = chosen.add_rms_norm_(residual, x, weight, eps, dtype)
    return normed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Returns LayerNorm over the last dimension; see `kernels.reference.encoders.layer_norm`."""
    if native_encoders.takes(x):
        return native_encoders.layer_norm(x, weight, bias, eps)
    return encoders.layer_norm(x, weight, bias, eps)


def activate(x: Tensor, name: str) -> Tensor:
    """Returns an activation of x [T, N]; see `kernels.reference.encoders.activate`."""
    if native_encoders.takes(x):
        return native_encoders.activate(x, name)
    return encoders.activate(x, name)


def rotate_halves(x: Tensor, cis: Tensor) -> Tensor:
    """Returns x [T, heads, D] rotated; see `kernels.reference.encoders.rotate_halves`."""
    return encoders.rotate_halves(x, cis)


def attend(
    q: Tensor, k: Tensor, v: Tensor, ends: Sequence[int], window: int | None = None, bias: Tensor | None = None
) -> Tensor:
    """Computes attention of every token to all of its input; see `kernels.reference.encoders.attend`."""
    return encoders.attend(q, k, v, ends, window, bias)


def attend_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes attention of some tokens to all of their input; see `kernels.reference.encoders.attend_all`."""
    return encoders.attend_all(q, k, v)


def distance_buckets(num: int, num_buckets: int, device: torch.device) -> Tensor:
    """Returns buckets of distances between tokens; see `kernels.reference.encoders.distance_buckets`."""
    return encoders.distance_buckets(num, num_buckets, device)


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """Replaces x [M, N], contiguous, by cap · tanh(x / cap) in place."""
    if gpu.takes(x):
        capped: Tensor = gpu.family("activation").soft_cap_(x, cap)
        return capped
    if builds.is_available() and x.dtype is torch.float32:
        return native.soft_cap_(x, cap)
    return elementwise.soft_cap_(x, cap)


def rotate_and_write(
    heads: Tensor, cis: Tensor, cache: Tensor, meta: AttentionMetadata, norms: HeadNorms | None = None
) -> None:
    """Rotates queries in place and writes rotated keys and values into the cache.

    Args:
        heads: [T or more, heads + 2 kv_heads, D]: queries, keys, values; rows beyond `meta.num_tokens` are padding. Its
            keys may stay unrotated.
        cis: complex64 [T or more, 1, D/2]. Checkpoints rotate the pair (i, i + D/2); loading permutes the rows of the
            projections so that the two numbers of a pair are neighbours.
        cache: [num_blocks, block_size, 2, kv_heads, slot_width(D)], in a memory order that `kernels.layout.layout`
            chooses; see `kernels.layout.slots`.
        norms: of queries and keys before their rotation; None without.
    """
    if gpu.takes(cache):
        numbers, scales = slots.parts(cache, heads.shape[2])
        gpu.family("kv_write").rotate_and_write(heads, cis, numbers, meta.write_slots, scales, norms)
        return
    if norms is not None:
        elementwise.norm_heads_(heads, norms)
    if native.takes(heads, cache):
        native.rotate_and_write(heads, cis, cache, meta)
        return
    kv_heads = cache.shape[3]
    elementwise.rope_(heads[:, :-kv_heads], cis)
    attention.write_kv(heads[:, -2 * kv_heads :].view(len(heads), 2, kv_heads, -1), cache, meta.write_slots)


def keeper(table: Tensor, column: int, width: int) -> Callable[[Tensor, Tensor, int], None]:
    """Returns a function that writes hidden states into `width` columns of a table [rows, W], from `column` on.

    The function takes contiguous states [T or more, width], slots int64 [num] and `num`, and writes the first `num`
    states into the rows `slots`, rounded to the table's dtype. On a GPU, a slot of -1 is skipped.
    """
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
    """Computes attention of every query over the cached keys of its own sequence, itself included.

    Args:
        q: [T or more, heads, D]; rows beyond `meta.num_tokens` are padding.
        cache: [num_blocks, block_size, 2, kv_heads, slot_width(D)], with this step's keys and values already written.
        scale, window, cap, sinks: see `AttentionOptions`.
        is_fixed: a row's bits depend on that row alone; on a GPU this uses another, slower schedule.

    Returns:
        [q's rows, heads * D]. Padding rows are zero on a CPU and undefined on a GPU.
    """
    if gpu.takes(cache):
        numbers, scales = slots.parts(cache, q.shape[2])
        options = AttentionOptions(scale, window, cap, sinks, is_fixed)
        found: Tensor = gpu.family("attention").paged_attention(q, numbers, meta.ragged, options, scales)
        return found
    if native.takes(q, cache):
        return native.paged_attention(q, cache, meta, scale, window, cap, sinks)
    return attention.paged_attention(q, cache, meta, scale, window, cap, sinks)


def sample(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Returns an id for each row of logits [R, V], and which rows are bad; see `kernels.reference.sampling.sample`."""
    if gpu.takes(logits):
        drawn: tuple[Tensor, Tensor] = gpu.family("sampling").sample(logits, rows)
        return drawn
    if native_sampling.takes(logits):
        ids = native_sampling.sample(logits, rows)
        return ids, ids < 0
    return sampling.sample(logits, rows)


def standing(sampled: Tensor, ids: Tensor, parents: Tensor, ends: Tensor) -> Tensor:
    """Returns which tokens of draft trees are accepted, in order; see `kernels.reference.speculation.standing`."""
    chosen = gpu.family("speculation") if gpu.takes(sampled) else speculation
    found: Tensor = chosen.standing(sampled, ids, parents, ends)
    return found


def move_slots_(layers: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copies single tokens to other slots, in all layers; see `kernels.reference.blocks.move_slots_`."""
    blocks.move_slots_(layers, sources, targets)


def write_runs_(table: Tensor, rows: Tensor, firsts: Tensor, offsets: Tensor, values: Tensor) -> None:
    """Writes short runs of numbers into a table in place; see `kernels.reference.inputs.write_runs_`."""
    chosen = gpu.family("inputs") if gpu.takes(table) else inputs
    chosen.write_runs_(table, rows, firsts, offsets, values)


def build_inputs(
    tokens: Tensor, tables: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, block_size: int, num_tokens: int
) -> StepInputs:
    """Builds a step's inputs from the state of its slots; see `kernels.reference.inputs.build_inputs`."""
    chosen = gpu.family("inputs") if gpu.takes(tokens) else inputs
    found: StepInputs = chosen.build_inputs(tokens, tables, slots, starts, ends, block_size, num_tokens)
    return found


def add_parts_(into: Tensor, buffers: PeerBuffers, parts: int) -> None:
    """Adds up partial sums in the memory of several ranks' devices; see `kernels.reference.peer_sums.add_parts_`."""
    chosen = gpu.family("peer_sums") if gpu.takes(into) else peer_sums
    chosen.add_parts_(into, buffers, parts)


def route(logits: Tensor, per_token: int, *, renormalises: bool) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token and their shares; see `kernels.reference.moe.route`."""
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
    """Computes the MLPs of the experts chosen for each token, by their shares; see
    `kernels.reference.moe.experts_mlp`."""
    chosen = gpu.family("moe") if gpu.takes(x) else moe
    y: Tensor = chosen.experts_mlp(x, gate_up, down, experts, shares, activation, is_fixed=is_fixed)
    return y


def choose(logits: Tensor, rows: Rows, changes: LogitAdjustments, wanted: ScoredRows | None) -> ChosenTokens:
    """Draws a token for each row of logits [R, V] as they are when adjusted, and scores the rows in `wanted`.

    Scores are under the logits before the adjustment. It changes logits in place, but of a row with a token mask those
    that the mask forbids may stay, unless no token can be drawn: then they are all -inf.
    """
    if native_sampling.takes(logits):
        return native_sampling.choose(logits, rows, changes, wanted)
    raw = None if wanted is None else logits[wanted.at]
    if changes != NO_CHANGES:
        adjust_(logits, changes)
    ids, bad = sample(logits, rows)
    ids = ids.masked_fill(bad, -1)
    if wanted is None or raw is None:
        return ChosenTokens(ids, None)
    return ChosenTokens(ids, score_chosen(raw, ids, wanted))


def score_chosen(raw: Tensor, ids: Tensor, wanted: ScoredRows) -> Scores:
    """Returns the scores of the rows in `wanted`, whose logits are `raw` [L, V], if ids [R] are chosen."""
    own = ids[wanted.at].clamp(min=0)
    return score(raw, ScoreRequest(own, wanted.nums, wanted.rows, wanted.others, wanted.width))


def adjust_(logits: Tensor, changes: LogitAdjustments) -> None:
    """Changes single logits of [R, V] in place before sampling; see `kernels.reference.adjust.adjust_`."""
    chosen = gpu.family("adjust") if gpu.takes(logits) else adjust
    chosen.adjust_(logits, changes)


def score(logits: Tensor, asked: ScoreRequest) -> Scores:
    """Returns log probabilities and ranks under logits [L, V]; see `kernels.reference.scores.score`."""
    if gpu.takes(logits):
        found: Scores = gpu.family("scores").score(logits, asked)
        return found
    if native_sampling.takes(logits):
        return native_sampling.score(logits, asked)
    return scores.score(logits, asked)


def suffix_automaton() -> type[SuffixAutomaton]:
    """Returns the suffix automaton class to use: the C++ one if it was built, else the Python one.

    It finds where the end of a growing sequence of ids occurred before.
    """
    return native.automaton() if builds.is_available() else SuffixAutomaton
