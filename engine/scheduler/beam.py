"""Beam search: ranks the candidates of all beams, selects those that continue, and collects complete hypotheses.

Pure: log probabilities in, parents and tokens out; independent of sequences, blocks and slots. The rules are those of
`transformers`' generate, so that equal logits give equal hypotheses: scores are sums of raw log probabilities, divided
by length ** length_penalty once complete; only candidates among the best `width` may complete; without early stopping
the search ends when no beam, at its present length, beats the worst of `width` complete hypotheses.
"""

import dataclasses
import math
from collections.abc import Sequence

from sluice_server.engine.plan import TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class BeamExtension:
    """One beam extended by one token; it stays live or completes a hypothesis.

    Attributes:
        parent: index of the beam.
        token: the token appended.
        score: sum of the log probabilities of the hypothesis' tokens.
        logprob: log probability of the token, with all candidates of its beam.
    """

    parent: int
    token: int
    score: float
    logprob: TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class BeamStep:
    """The decisions of one step of the search.

    Attributes:
        live: beams of the next step, best first; empty when the search is over.
        complete: hypotheses that are complete with this step, each with its final score.
    """

    live: tuple[BeamExtension, ...]
    complete: tuple[tuple[float, BeamExtension], ...]


class BeamSearch:
    """State of one beam search: the scores of its best complete hypotheses."""

    def __init__(self, width: int, length_penalty: float, early_stopping: bool) -> None:
        self.width = width
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._scores: list[float] = []  # of the best complete hypotheses, best first

    def advance(
        self, beams: Sequence[tuple[float, TokenLogprob]], length: int, end_ids: frozenset[int], at_end: bool
    ) -> BeamStep:
        """Selects the beams that continue and the hypotheses that are complete.

        Args:
            beams: per beam its score and candidates, at least width + len(end_ids) where the vocabulary has them.
            length: tokens of a hypothesis after this step.
            end_ids: ids that complete a hypothesis.
            at_end: no hypothesis may grow further.
        """
        ranked = _ranked(beams)
        complete: list[tuple[float, BeamExtension]] = []
        live: list[BeamExtension] = []
        for rank, step in enumerate(ranked):
            if not at_end and step.token not in end_ids:
                live.append(step)
            elif rank < self.width:
                complete.append((step.score / length**self._length_penalty, step))
            if len(live) == self.width or (at_end and rank + 1 == self.width):
                break
        if self._early_stopping and len(self._scores) == self.width:
            complete = []
        complete = [(score, step) for score, step in complete if self._keep(score)]
        return BeamStep(tuple(live) if live and not self._is_over(live[0].score, length) else (), tuple(complete))

    def _keep(self, score: float) -> bool:
        """Records a complete hypothesis; returns False if it is not among the best `width`."""
        if len(self._scores) == self.width and score <= self._scores[-1]:
            return False
        self._scores.append(score)
        self._scores.sort(reverse=True)
        del self._scores[self.width :]
        return True

    def _is_over(self, best: float, length: int) -> bool:
        if len(self._scores) < self.width:
            return False
        return self._early_stopping or best / length**self._length_penalty <= self._scores[-1]


def _ranked(beams: Sequence[tuple[float, TokenLogprob]]) -> list[BeamExtension]:
    """Returns every finite candidate, best first; equal ones in the order of beams and ids."""
    steps = [
        BeamExtension(parent, token, score + logprob, TokenLogprob(logprob, rank, found.top_ids, found.top_logprobs))
        for parent, (score, found) in enumerate(beams)
        for rank, (token, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True), 1)
        if math.isfinite(logprob)
    ]
    steps.sort(key=lambda step: -step.score)
    return steps
