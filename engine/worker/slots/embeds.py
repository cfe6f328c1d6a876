"""Prompt embeddings of each slot: rows of hidden states in the place of those that the model has for ids.

Takes slots and plans, not requests.
"""

import itertools
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.plan import Placement, StepPlan
from sluice_server.engine.prompt_embeds import EmbedsType, PromptEmbeds

DTYPES = {EmbedsType.FLOAT32: torch.float32, EmbedsType.BFLOAT16: torch.bfloat16}
Given = list[tuple[int, Tensor]]  # index of the first token of the step, rows from there on


class EmbeddingModel(Protocol):
    """What prompt embeddings depend on."""

    dtype: torch.dtype
    device: torch.device


class SlotEmbeds:
    """Prompt embeddings by slot, for the slots whose requests brought any."""

    def __init__(self) -> None:
        self._embeds: dict[int, PromptEmbeds] = {}

    def reset(self, placement: Placement) -> None:
        """Replaces those of the slot's former sequence."""
        self._embeds.pop(placement.slot, None)
        if placement.prompt_embeds is not None:
            self._embeds[placement.slot] = placement.prompt_embeds

    def given(self, plan: StepPlan, model: EmbeddingModel) -> Given:
        """Returns the rows that the plan's tokens take, rounded to the model's dtype as its own embeddings are."""
        found: Given = []
        if not self._embeds:
            return found
        ends = itertools.accumulate(plan.query_lens)
        for slot, start, num, end in zip(plan.slots, plan.starts, plan.query_lens, ends, strict=True):
            embeds = self._embeds.get(slot)
            if embeds is not None and start < embeds.num_tokens:
                rows = _rows(embeds, start, start + num)
                found.append((end - num, rows.to(model.device, model.dtype)))
        return found


def _rows(embeds: PromptEmbeds, first: int, last: int) -> Tensor:
    """Returns rows `first` to `last` (at most) as a tensor [N, width]."""
    size = len(embeds.values) // embeds.num_tokens
    part = bytearray(embeds.values[first * size : last * size])
    return torch.frombuffer(part, dtype=DTYPES[embeds.dtype]).view(-1, size // embeds.dtype.size)
