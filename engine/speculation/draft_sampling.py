"""Samples drafts from a drafter's logits, with the noise of the positions that they are for.

The same noise makes drafts agree with the target's tokens often. Rows are sampled like the target's, except for
parameters that depend on the existing tokens (penalties, banned tokens, grammars): drafts need only agree often.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from sluice_server.engine.plan import DraftRequest
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling.columns import FLOATS, INTS, pack, sampling_rows
from sluice_server.engine.sampling.rows import SamplingParamRows, SamplingRows, allow, bits_of
from sluice_server.engine.sampling.sampler import Sampler
from sluice_server.engine.speculation.draft_rows import DraftRow


class DraftSampling:
    """Samples drafts; caches the packed parameters of the rows that sampled last, by number of the draft."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sampler = Sampler()
        self._param_rows: list[tuple[list[tuple[SamplingParams, int]], SamplingParamRows]] = []

    def draw(self, rows: Sequence[DraftRow], logits: Tensor) -> None:
        """Samples the next draft of each row from logits [rows, V]; all rows have equally many drafts.

        A row with a width above 1 also gets alternatives: each is what would be drafted if the ones before it were not
        allowed.
        """
        asks = [row.ask for row in rows]
        positions = np.array([row.num_tokens for row in rows], dtype=np.int64)
        param_rows = SamplingRows(self._param_rows_of(len(rows[0].drafts), asks), positions)
        width = max(ask.width for ask in asks)
        left = logits.clone() if width > 1 else logits
        drafted = self._sampler.sample(logits, param_rows).ids
        for row, token in zip(rows, drafted, strict=True):
            row.drafts.append(token)
            row.others.append([])
        for num in range(1, width):
            places = [i for i, token in enumerate(drafted) if token >= 0]
            if not places:  # no further token is possible
                break
            left[places, [drafted[i] for i in places]] = float("-inf")
            drafted = self._sampler.sample(left.clone(), param_rows).ids
            for row, token in zip(rows, drafted, strict=True):
                if token >= 0 and num < row.ask.width:
                    row.others[-1].append(token)

    def _param_rows_of(self, number: int, asks: Sequence[DraftRequest]) -> SamplingParamRows:
        """Returns the parameters of the rows that make their draft of this number."""
        if number < len(self._param_rows):
            whose, param_rows = self._param_rows[number]
            if len(whose) == len(asks) and all(map(_is_of, asks, whose)):
                return param_rows
        found = [(ask.params, ask.output_index) for ask in asks], _param_rows(asks, self._vocab_size)
        self._param_rows[number : number + 1] = [found]
        return found[1]


def _is_of(ask: DraftRequest, whose: tuple[SamplingParams, int]) -> bool:
    return ask.params is whose[0] and ask.output_index == whose[1]


def _param_rows(asks: Sequence[DraftRequest], vocab_size: int) -> SamplingParamRows:
    owners = [(ask.params, ask.output_index) for ask in asks]
    wanted = [(i, params.allowed_token_ids) for i, (params, _) in enumerate(owners) if params.allowed_token_ids]
    allowed = allow([(i, bits_of(ids, vocab_size)) for i, ids in wanted])
    return sampling_rows(pack(FLOATS, owners), pack(INTS, owners), allowed=allowed)
