"""Pooled hidden states: the last token's of a prompt, or the mean of all, over the steps in which it is computed.

Computing a row twice changes nothing: the sum of a chunk is kept under the chunk's first position. Takes slots and
plans, not requests.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.plan import Placement, StepPlan, StepResult
from sluice_server.engine.request import Pooling


class PoolingModel(Protocol):
    """What pooling needs of a model."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns the final norm of hidden states [R, H]."""

    def classes(self, normed: Tensor) -> Tensor:
        """Returns what the classification head makes of normed hidden states."""


class SlotPooling:
    """The sums of hidden states so far, by slot, for the slots whose requests ask for a mean."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[int, Tensor]] = {}  # by slot, then by a chunk's first position
        self._classifies: set[int] = set()

    def reset(self, placement: Placement) -> None:
        """Sets what is pooled in the slot. A sequence that runs may be placed again: its sums stay until its prompt
        begins anew."""
        self._classifies.discard(placement.slot)
        if placement.pooling is Pooling.CLASSES:
            self._classifies.add(placement.slot)
        if placement.pooling is Pooling.MEAN:
            self._sums.setdefault(placement.slot, {})
        else:
            self._sums.pop(placement.slot, None)

    def pool(self, plan: StepPlan, hidden: Tensor, model: PoolingModel) -> dict[int, Tensor]:
        """Returns the vector, float32, of each row of the plan whose pooled prompt ends in this step.

        Args:
            hidden: [T, H], of the step's T tokens.
            model: has the final norm and the classification head.
        """
        found = {}
        rows = zip(plan.slots, plan.starts, plan.query_lens, itertools.accumulate(plan.query_lens), strict=True)
        for i, (slot, start, num, end) in enumerate(rows):
            if i not in plan.pools:
                continue
            sums = self._sums.get(slot)
            if sums is not None:
                if not start:
                    sums.clear()
                sums[start] = model.normed(hidden[end - num : end]).sum(0)
            if plan.pools[i]:
                last = model.normed(hidden[end - 1 : end])
                last = model.classes(last) if slot in self._classifies else last
                found[i] = last[0] if sums is None else _mean(sums, start + num)
        return found


def with_vectors(result: StepResult, vectors: Mapping[int, Tensor]) -> StepResult:
    """Returns the result with the vectors of its rows; a row whose vector has no usable number fails."""
    if not vectors:
        return result
    found = {i: vector.cpu().numpy() for i, vector in vectors.items()}
    good = {i for i, vector in found.items() if np.isfinite(vector).all()}
    return dataclasses.replace(
        result,
        failed=result.failed.union(found.keys() - good),
        pooled={i: found[i].astype("<f4").tobytes() for i in good},
    )


def _mean(sums: Mapping[int, Tensor], num_tokens: int) -> Tensor:
    return torch.stack([sums[start] for start in sorted(sums)]).sum(0) / num_tokens
