"""Writes the plan of a step for its runner, once the planner has chosen the rows."""

from typing import NamedTuple

from sluice_server.engine.kv_cache.table import BlockRun
from sluice_server.engine.plan import StepPlan
from sluice_server.engine.scheduler.sequence import Sequence
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.scheduler.whole_images import wholes_of


class PlannedRows(NamedTuple):
    """The rows of a step, those of one token first.

    Attributes:
        sequences, lens: of each row, and how many tokens it computes.
        num_decodes: rows that are one token behind, with or without drafts.
        num_drafts: tokens that were drafted, by those of these rows that have some.
    """

    sequences: list[Sequence]
    lens: list[int]
    num_decodes: int
    num_drafts: dict[Sequence, int]


def write(step: int, planned: PlannedRows, state: SchedulerState) -> StepPlan:
    """Returns the plan of a step. It carries the placements and blocks that no plan has carried before."""
    rows, lens, all_decodes, num_drafts = planned
    starts = [one.num_computed + one.num_flying for one in rows]
    num_decodes = all_decodes - len(num_drafts)  # that come first, each behind its newest token
    token_ids = [one.tokens[-1] for one in rows[:num_decodes]]
    samples = [True] * num_decodes
    drafts: dict[int, int] = {}
    parents: dict[int, tuple[int, ...]] = {}
    for i in range(num_decodes, len(rows)):
        one, num, start = rows[i], lens[i], starts[i]
        token_ids.extend(one.tokens[start : start + num])
        samples.append(start + num >= len(one.tokens))
        if one in num_drafts and one.drafting is not None:
            token_ids.extend(one.drafting.ids)
            drafts[i] = num_drafts[one]
            if one.drafting.parents:
                parents[i] = tuple(one.drafting.parents)
    pools = _pools(rows, samples) if state.num_pooling else {}
    has_wholes = state.images is not None and state.images.are_whole
    return StepPlan(
        step=step,
        slots=[one.slot for one in rows],
        query_lens=lens,
        starts=starts,
        token_ids=token_ids,
        samples=samples,
        placements=state.take_placements(),
        new_blocks=new_blocks(rows, state.cache.pool.null),
        drafts=drafts,
        parents=parents,
        pools=pools,
        wholes=_wholes(rows, starts, lens) if has_wholes else [],
    )


def new_blocks(rows: list[Sequence], null: int) -> list[BlockRun]:
    """Returns the parts of the block tables of `rows` that no plan has carried to the runner yet. `null` is the block
    in place of those that have left the attention window."""
    found: list[BlockRun] = []
    for one in rows:
        planned, num = one.num_blocks_planned, len(one.table.groups[0])
        if planned < num:
            found += [BlockRun(one.slot, planned, own[planned:], group) for group, own in enumerate(one.table.groups)]
            one.num_blocks_planned = num
        if one.freed:
            found += [BlockRun(one.slot, first, [null] * length, group) for group, first, length in one.freed]
            one.freed.clear()
    return found


def _wholes(rows: list[Sequence], starts: list[int], lens: list[int]) -> list[tuple[int, int]]:
    """Returns the ranges of the step's tokens that are of one image."""
    parts = zip(rows, starts, lens, strict=True)
    return wholes_of((one.group.request.images, start, num) for one, start, num in parts)


def _pools(rows: list[Sequence], samples: list[bool]) -> dict[int, bool]:
    """Returns the rows that are pooled, each with whether its prompt ends, and has none of them sample."""
    pools = {i: samples[i] for i, one in enumerate(rows) if one.is_pooled}
    for i in pools:
        samples[i] = False
    return pools
