"""Log probabilities of prompt tokens, for the slots that request them: which positions of a step yield some, and which.

A token is scored with the logits computed at the position before it; the first token of a prompt has none. Takes slots
and sampling parameters.
"""

import itertools
from collections.abc import Callable, Sequence

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

    def reset(self, placement: Placement) -> None:
        """Replaces the state of the slot's former sequence."""
        self._prompts.pop(placement.slot, None)
        if placement.params.prompt_logprobs >= 0:
            prompt = placement.tokens[: placement.num_prompt]
            self._prompts[placement.slot] = prompt, placement.params.prompt_logprobs

    def score(self, plan: StepPlan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> dict[int, PromptLogprobs]:
        """Returns, by row of the plan, the log probabilities of its prompt tokens.

        Args:
            hidden: [T, H], of the step's T tokens.
            logits_of: computes logits float32 [L, V] from hidden states [L, H].
        """
        if not self._prompts:
            return {}
        found = {}
        ends = itertools.accumulate(plan.query_lens)
        for i, (slot, start, num, end) in enumerate(zip(plan.slots, plan.starts, plan.query_lens, ends, strict=True)):
            if slot in self._prompts:
                prompt, candidates = self._prompts[slot]
                tokens = prompt[start + 1 : start + num + 1]
                if tokens:
                    own = hidden[end - num : end - num + len(tokens)]
                    found[i] = PromptLogprobs(start + 1, _scores(own, tokens, candidates, logits_of))
        return found


def _scores(
    hidden: Tensor, tokens: Sequence[int], candidates: int, logits_of: Callable[[Tensor], Tensor]
) -> tuple[TokenLogprob, ...]:
    """Scores tokens that follow the hidden states [L, H]."""
    scores: list[TokenLogprob] = []
    for at in range(0, len(tokens), CHUNK):
        part = tokens[at : at + CHUNK]
        with torch.inference_mode():
            scores += score(logits_of(hidden[at : at + CHUNK]), part, candidates)
    return tuple(scores)
