"""Divides the keys of a step's queries among programs, by length, on the device: one plan for all layers of a step.

A unit is the queries of one row that share a tile. The keys of all units together, divided by the number of programs
that should share them, are a fair part; a unit is split into parts of equal length near it, so that one long row does
not keep the others waiting. Items of work are ordered by length, the longest first, in few classes. Their number is
bounded by numbers of the host, so that the grid of a recorded step stays the same.

Where bits must not depend on the batch, parts are the keys between multiples of a fixed size. Then the plan decides
only which programs compute them: a program folds the parts of its item in the order in which they are merged otherwise.
"""

import dataclasses
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sluice_server.kernels.triton.aot import AotCase
from sluice_server.kernels.triton.dependent import dependent, wait_for_inputs

UNITS = 256  # units that the planning program looks at together
CLASSES = 8  # of items by length
ITEM = tl.constexpr(8)  # numbers of an item: row, first query, first key, end, slot, parts of its queries; two unused
ENTRY = tl.constexpr(4)  # numbers of an entry: token, first slot, parts, unused


class Division(NamedTuple):
    """How the keys of rows are divided.

    Attributes:
        least, most: tokens of the rows that are planned; others are skipped.
        block: queries of a unit.
        tile: keys of a tile; parts are whole tiles.
        part: keys of a part: at least, or exactly if fixed.
        programs: items among which the keys of a kv head are divided.
        window: number of visible keys; 0 for all.
        is_fixed: parts end at multiples of `part`.
        is_causal: a query sees no key behind its own.
        is_merged: every unit's result is a part, because other results are merged with it.
    """

    least: int
    most: int
    block: int
    tile: int
    part: int
    programs: int
    window: int = 0
    is_fixed: bool = False
    is_causal: bool = True
    is_merged: bool = False


class PlannedRows(NamedTuple):
    """The rows that a plan is for.

    Attributes:
        starts: int32 [rows + 1], a row's first token.
        contexts: int32 [rows], keys of a row.
        prefixes: int32 [rows], keys that another plan is for; None for none.
        ends: int32 [T], where the keys end that a token sees; None if each sees all tokens up to itself.
    """

    starts: Tensor
    contexts: Tensor
    prefixes: Tensor | None = None
    ends: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """Items of work for the attention kernels, and the memory of their parts.

    Attributes:
        items: int32 [items, ITEM], zeros behind the last. The slot is that of the unit's first query; -1 where
            the result is whole. Parts of a query have neighbouring slots.
        entries: int32 [entries, ENTRY], zeros behind the last: tokens whose parts are merged; by token if `is_merged`.
        parts: float32 [slots, heads, D].
        sums: float32 [slots, heads, 2]: highest score in base 2, total.
    """

    items: Tensor
    entries: Tensor
    parts: Tensor
    sums: Tensor


def planned(
    rows: PlannedRows,
    bounds: tuple[int, int, int, int],
    division: Division,
    heads: int,
    dim: int,
) -> AttentionPlan:
    """Plans rows. `bounds`: their number, and upper bounds of their tokens, of the tokens of one row that is planned
    and of its keys."""
    (starts, contexts, prefixes, ends), (num_rows, num_tokens, max_query, max_keys) = rows, bounds
    num_units = num_tokens // division.block + num_rows
    most_units = min(num_units, num_rows * triton.cdiv(max_query, division.block))
    num_parts = num_parts_of(division, most_units, max_keys)
    per_unit = min(division.block, max_query)
    num_entries = num_tokens if division.is_merged else min(num_parts // 2 * per_unit, num_tokens)
    num_items = most_units + num_parts
    numbers = torch.zeros(num_items * ITEM.value + num_entries * ENTRY.value, dtype=torch.int32, device=starts.device)
    items = numbers[: num_items * ITEM.value].view(num_items, ITEM.value)
    entries = numbers[num_items * ITEM.value :].view(num_entries, ENTRY.value)
    attention_plan_kernel[(1,)](
        starts,
        contexts,
        contexts if prefixes is None else prefixes,
        contexts if ends is None else ends,
        items,
        entries if num_entries else items,
        num_rows,
        num_units,
        num_parts,
        per_unit,
        *division[:2],
        *division[4:7],
        BLOCK_Q=division.block,
        TILE=division.tile,
        IS_FIXED=division.is_fixed,
        IS_CAUSAL=division.is_causal,
        IS_MERGED=division.is_merged,
        HAS_PREFIX=prefixes is not None,
        HAS_ENDS=ends is not None,
        HAS_WINDOW=division.window > 0,
        num_warps=UNITS // 32,
        **dependent(starts),
    )
    slots = max(1, num_parts * per_unit)
    parts, sums = (torch.empty(slots, heads, width, dtype=torch.float32, device=starts.device) for width in (dim, 2))
    return AttentionPlan(items, entries, parts, sums)


def num_parts_of(division: Division, num_units: int, max_keys: int) -> int:
    """Returns how many items may be parts.

    A unit that is split has at least one and a half fair parts of the `programs`, which rounding makes two. Parts of a
    fixed size are those of the longest row at least; where every unit has parts, each may have one more.
    """
    if division.is_merged:
        return division.programs + num_units
    if max_keys <= division.part:
        return 0
    return 4 * division.programs // 3 + (triton.cdiv(max_keys, division.part) if division.is_fixed else 1)


@triton.jit
def unit_of(
    unit,  # int32 [UNITS]
    starts,
    contexts,
    prefixes,
    ends,
    num_rows,
    num_units,
    least,
    most,
    window,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Returns the row of each unit, its first query within the row, the row's first token, the number of queries, and
    the first key and end of those that they see; end and first key are equal where there is no such unit.

    A row's units begin at (its first token) / BLOCK_Q + its index, which leaves space for a partly filled last one.
    The row is found by bisection.
    """
    low = unit * 0
    high = low + num_rows
    size = num_rows
    while size > 1:
        middle = (low + high) // 2
        is_open = high - low > 1
        is_before = tl.load(starts + middle) // BLOCK_Q + middle <= unit
        low = tl.where(is_open & is_before, middle, low)
        high = tl.where(is_open & (is_before == 0), middle, high)
        size = (size + 1) // 2
    begin = tl.load(starts + low)
    num = tl.load(starts + low + 1) - begin
    context = tl.load(contexts + low)
    skipped = (unit - begin // BLOCK_Q - low) * BLOCK_Q
    first = tl.load(prefixes + low) if HAS_PREFIX else context * 0
    end = context
    if HAS_WINDOW:
        first = tl.maximum(0, context - num + (skipped if IS_CAUSAL else 0) - window + 1) // TILE * TILE
    if IS_CAUSAL:
        end = tl.minimum(context, context - num + skipped + BLOCK_Q)
    is_unit = (unit < num_units) & (skipped < num) & (num >= least) & (num <= most)
    queries = tl.minimum(num - skipped, BLOCK_Q)
    if HAS_ENDS:
        for i in tl.range(0, BLOCK_Q):
            end = tl.maximum(end, tl.load(ends + begin + skipped + i, mask=is_unit & (i < queries), other=0))
    return low, skipped, begin, queries, first, tl.where(is_unit, end, first)


@triton.jit(
    do_not_specialize=["num_rows", "num_units", "num_parts", "per_unit", "least", "most", "part", "programs", "window"]
)  # otherwise a new value is compiled during a request
def attention_plan_kernel(
    starts,  # int32 [rows + 1], a row's first token
    contexts,  # int32 [rows], keys of a row
    prefixes,  # int32 [rows], keys that are not of interest; unused without HAS_PREFIX
    ends,  # int32 [T], where the keys end that a token sees; unused without HAS_ENDS
    items,  # int32 [items, ITEM], zeros
    entries,  # int32 [entries, ENTRY], zeros
    num_rows,
    num_units,
    num_parts,  # items that may be parts
    per_unit,  # slots of an item that is a part
    least,
    most,
    part,
    programs,
    window,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    IS_FIXED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_MERGED: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    UNITS: tl.constexpr = UNITS,
    CLASSES: tl.constexpr = CLASSES,
):
    """Plans a step; see `Division` and `AttentionPlan`. Grid: one program."""
    wait_for_inputs(IS_DEPENDENT)
    all_keys = tl.zeros((UNITS,), tl.int64)
    most_keys = tl.zeros((UNITS,), tl.int32)
    for at in tl.range(0, num_units, UNITS):
        unit = at + tl.arange(0, UNITS)
        _, _, _, _, first, end = unit_of(
            unit, starts, contexts, prefixes, ends, num_rows, num_units, least, most, window,
            BLOCK_Q, TILE, IS_CAUSAL, HAS_PREFIX, HAS_ENDS, HAS_WINDOW,
        )  # fmt: skip
        all_keys += end - first
        most_keys = tl.maximum(most_keys, end - first)
    wanted = tl.maximum((tl.sum(all_keys, 0) + programs - 1) // programs, part).to(tl.int32)  # keys of a part
    longest = tl.max(most_keys, 0)
    if not IS_FIXED:
        longest = tl.minimum(longest, wanted + wanted // 2)

    num_items = 0
    num_used = 0  # of num_parts
    num_entries = 0
    for step in tl.range(0, CLASSES):
        for at in tl.range(0, num_units, UNITS):
            unit = at + tl.arange(0, UNITS)
            row, skipped, begin, queries, first, end = unit_of(
                unit, starts, contexts, prefixes, ends, num_rows, num_units, least, most, window,
                BLOCK_Q, TILE, IS_CAUSAL, HAS_PREFIX, HAS_ENDS, HAS_WINDOW,
            )  # fmt: skip
            keys = end - first
            origin, size = parts_of(first, keys, wanted, part, TILE, IS_FIXED)
            length = keys if IS_FIXED else size
            own_class = tl.minimum(length.to(tl.int64) * CLASSES // (longest + 1), CLASSES - 1)
            is_now = (keys > 0) & (own_class == CLASSES - 1 - step)
            count = tl.where(is_now, tl.cdiv(end - origin, size), 0)

            asked = count if IS_MERGED else tl.where(count > 1, count, 0)
            used = num_used + tl.cumsum(asked, 0)
            is_split = (asked > 0) & (used <= num_parts)
            num_used += tl.sum(asked, 0)
            slot = tl.where(is_split, (used - asked) * per_unit, -1)
            count = tl.where(is_split, count, tl.minimum(count, 1))
            size = tl.where(is_split, size, end - origin)

            place = num_items + tl.cumsum(count, 0) - count
            num_items += tl.sum(count, 0)
            store_items(items, place, count, row, skipped, origin, size, first, end, slot)

            merged = tl.where(is_split, queries, 0)
            place = num_entries + tl.cumsum(merged, 0) - merged
            num_entries += tl.sum(merged, 0)
            store_entries(entries, place, merged, begin + skipped, slot, count, IS_MERGED)


@triton.jit
def parts_of(first, keys, wanted, part, TILE: tl.constexpr, IS_FIXED: tl.constexpr):
    """Returns where the first part of each unit begins, and the keys of a part."""
    if IS_FIXED:
        return first // part * part, first * 0 + part
    else:
        num = tl.maximum((keys + wanted // 2) // wanted, 1)
        return first, tl.maximum(tl.cdiv(tl.cdiv(keys, num), TILE), 1) * TILE


@triton.jit
def store_items(items, place, count, row, skipped, origin, size, first, end, slot):
    """Stores the items of units, `count` of each from `place` on."""
    for i in tl.range(0, tl.max(count, 0)):
        item = items + (place + i) * ITEM
        is_item = i < count
        tl.store(item, row, mask=is_item)
        tl.store(item + 1, skipped, mask=is_item)
        tl.store(item + 2, tl.maximum(origin + i * size, first), mask=is_item)
        tl.store(item + 3, tl.minimum(origin + (i + 1) * size, end), mask=is_item)
        tl.store(item + 4, tl.where(slot < 0, -1, slot + i), mask=is_item)
        tl.store(item + 5, count, mask=is_item)


@triton.jit
def store_entries(entries, place, merged, token, slot, count, IS_MERGED: tl.constexpr):
    """Stores an entry for each of the `merged` queries of units, the first of which is `token`."""
    for i in tl.range(0, tl.max(merged, 0)):
        entry = entries + ((token if IS_MERGED else place) + i) * ENTRY
        is_entry = i < merged
        tl.store(entry, token + i, mask=is_entry)
        tl.store(entry + 1, slot + i * count, mask=is_entry)
        tl.store(entry + 2, count, mask=is_entry)


def _case(name: str, block: int, **flags: bool) -> AotCase:
    names = ("IS_FIXED", "IS_CAUSAL", "IS_MERGED", "HAS_PREFIX", "HAS_ENDS", "HAS_WINDOW")
    constants = {"BLOCK_Q": block, "TILE": 64, "UNITS": UNITS, "CLASSES": CLASSES} | dict.fromkeys(names, False) | flags
    arguments = attention_plan_kernel.arg_names
    types = dict.fromkeys(arguments[:6], "*i32") | dict.fromkeys(arguments[6:15], "i32")
    return AotCase(
        f"attention-plan/{name}",
        attention_plan_kernel,
        types,
        constants,
        frozenset(arguments[6:15]),
        num_warps=UNITS // 32,
        vectors=frozenset(),
        is_quick=name == "decode",
    )


CASES = (
    _case("decode", 4, IS_CAUSAL=True),
    _case("prefill-window", 32, IS_CAUSAL=True, HAS_WINDOW=True),
    _case("prefill-ends", 32, IS_CAUSAL=True, HAS_ENDS=True),
    _case("fixed", 16, IS_CAUSAL=True, IS_FIXED=True),
    _case("prefix", 16, IS_MERGED=True),
    _case("suffix", 4, IS_CAUSAL=True, IS_MERGED=True, HAS_PREFIX=True),
)
