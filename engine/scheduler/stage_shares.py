"""Shares the work of a pipeline among the steps that its stages compute at the same time. Pure: sizes in, sizes out.

A step that took all decodes, or a whole prompt, would leave the other stages without work. A prompt is cut in parts, as
its tokens are known: the first stage computes one part while the next computes the one before.
"""

from collections.abc import Iterable

from sluice_server.engine.scheduler.prefill_shares import QUANTUM
from sluice_server.engine.scheduler.sequence import Sequence


def decode_share(num: int, running: Iterable[Sequence], stages: int) -> int:
    """Returns how many of `num` decodes that may be computed now a step takes."""
    return num if stages == 1 else -(-(num + sum(one.num_flying > 0 for one in running)) // stages)


def prompt_share(prefills: Iterable[Sequence], running: Iterable[Sequence], budget: int, stages: int) -> int:
    """Returns how many tokens of `budget` a step takes of prompts: a quantum at least."""
    if stages == 1:
        return budget
    num = sum(one.num_missing for one in prefills) + sum(one.num_flying for one in running)
    return min(budget, max(QUANTUM, -(-num // stages)))
