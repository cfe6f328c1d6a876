"""Log probabilities of prompt tokens, for the slots that request them: which positions of a step yield some, and which.

A token is scored with the logits computed at the position before it; the first token of a prompt has none. Takes slots
and sampling parameters.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sluice_server.engine.plan import Placement, PromptLogprobs, StepPlan, TokenLogprob
from sluice_server.engine.sampling.logprobs import score

CHUNK = 64  # positions whose logits are in memory at once


class SlotPrompts:
    """Prompts by slot, for the slots that request their log probabilities."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[Sequence[int], int]] = {}  # tokens, candidates

    @property
    def is_asked(self) -> bool:
        """Whether any slot requests them: then all hidden states of a step may be needed."""
        return bool(self._prompts)

    def changes_by(self, placement: Placement) -> bool:
        """Returns whether the slot's former sequence requests them, or the new one."""
        return placement.slot in self._prompts or placement.params.prompt_logprobs >= 0

    def reset(self, placement: Placement) -> None:
        """Replaces the state of the slot's former sequence."""
        self._prompts.pop(placement.slot, None)
        if placement.params.prompt_logprobs >= 0:
            prompt = placement.tokens[: placement.num_prompt]
            self._prompts[placement.slot] = prompt, placement.params.prompt_logprobs

    def spans(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Returns the ranges of the plan's tokens whose logits score prompts, in the order of `score`."""
        return [span for _, _, spans in self._asked(plan) for span in spans]

    def score(self, plan: StepPlan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> dict[int, PromptLogprobs]:
        """Returns, by row of the plan, the log probabilities of its prompt tokens.

        Args:
            hidden: [T, H], of the step's T tokens.
            logits_of: computes logits float32 [L, V] from hidden states [L, H].
        """
        found = {}
        for i, tokens, spans in self._asked(plan):
            candidates, scores = self._prompts[plan.slots[i]][1], list[TokenLogprob]()
            for at, (first, end) in zip(itertools.count(0, CHUNK), spans):
                with torch.inference_mode():
                    scores += score(logits_of(hidden[first:end]), tokens[at : at + CHUNK], candidates)
            found[i] = PromptLogprobs(plan.starts[i] + 1, tuple(scores))
        return found

    def _asked(self, plan: StepPlan) -> Iterator[tuple[int, Sequence[int], list[tuple[int, int]]]]:
        """Yields the rows that score tokens: the row, these tokens, and the tokens of the step before each, in ranges
        of at most CHUNK."""
        if not self._prompts:
            return
        ends = itertools.accumulate(plan.query_lens)
        for i, (slot, start, num, end) in enumerate(zip(plan.slots, plan.starts, plan.query_lens, ends, strict=True)):
            if slot in self._prompts:
                tokens = self._prompts[slot][0][start + 1 : start + num + 1]
                first, last = end - num, end - num + len(tokens)
                if tokens:
                    yield i, tokens, [(at, min(at + CHUNK, last)) for at in range(first, last, CHUNK)]
