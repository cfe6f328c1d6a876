"""Prompts whose tokens' log probabilities are asked for: which places of a step tell one, and what they tell.

The token at a place is judged by what was computed at the place before it; the first one of a prompt has none before
it. Knows slots and parameters; no request.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sluice_server.engine.plan import Placement, PromptLogprobs, StepPlan, TokenLogprob
from sluice_server.engine.sampling.logprobs import score

CHUNK = 64  # places whose logits exist at once


class SlotPrompts:
    """Indexed by slot, for those that ask."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[Sequence[int], int]] = {}  # tokens, candidates

    @property
    def is_asked(self) -> bool:
        """Whether anybody asks: all of a step's hidden states may be wanted."""
        return bool(self._prompts)

    def reset(self, placement: Placement) -> None:
        """Forget whoever had the slot."""
        self._prompts.pop(placement.slot, None)
        if placement.params.prompt_logprobs >= 0:
            prompt = placement.tokens[: placement.num_prompt]
            self._prompts[placement.slot] = prompt, placement.params.prompt_logprobs

    def score(self, plan: StepPlan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> dict[int, PromptLogprobs]:
        """Of the plan's rows, what they tell of their prompts.

        Args:
            hidden: [T, H] of the step's T tokens.
            logits_of: makes logits float32 [L, V] of hidden states [L, H].
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
    """Of tokens that follow the hidden states [L, H]."""
    scores: list[TokenLogprob] = []
    for at in range(0, len(tokens), CHUNK):
        part = tokens[at : at + CHUNK]
        with torch.inference_mode():
            scores += score(logits_of(hidden[at : at + CHUNK]), part, candidates)
    return tuple(scores)
