"""Samples one token per row from logits in one vectorised pass, for all rows of a step, whatever their parameters.

Log probabilities are computed only for the rows that request them.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from sluice_server.engine.errors import ServiceError, constraint_lost, nothing_left
from sluice_server.engine.plan import TokenLogprob
from sluice_server.engine.sampling.fixed import FixedRows
from sluice_server.engine.sampling.rows import SamplingParamRows, SamplingRows
from sluice_server.engine.sampling.strategies import Strategy, choose_
from sluice_server.kernels import ops
from sluice_server.kernels.reference.adjust import LogitAdjustments
from sluice_server.kernels.reference.choice import ChosenTokens

MAX_KEPT = 32  # parameter rows: those of other draft lengths alternate
NO_STRATEGIES: Mapping[int, Strategy] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows:
    """The sampled tokens of a step.

    Attributes:
        ids: the token of each row.
        bad: rows whose logits held no usable number, whose grammar was lost or whose strategy failed; their id is
            meaningless.
        logprobs: by row that requested them.
        errors: by bad row whose request caused the failure.
    """

    ids: list[int]
    bad: list[int]
    logprobs: dict[int, TokenLogprob]
    errors: dict[int, ServiceError] = dataclasses.field(default_factory=dict)


class Sampler:
    """Samples tokens; caches only tensors of recurring parameters.

    Noise is a function of (seed, output, position, token id).
    """

    def __init__(self) -> None:
        self._fixed: dict[SamplingParamRows, FixedRows] = {}

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, rows: SamplingRows, strategies: Mapping[int, Strategy] = NO_STRATEGIES
    ) -> SampledRows:
        """Samples from logits float32 [R, V], which may be overwritten, with the R rows' parameters.

        `strategies`: by row, what chooses its token instead.
        """
        fixed = self._fixed.get(rows.param_rows)
        if fixed is None:
            if len(self._fixed) >= MAX_KEPT:
                self._fixed.clear()
            fixed = self._fixed[rows.param_rows] = FixedRows(rows.param_rows, logits.shape[1], logits.device)
        failed: dict[int, ServiceError] = {}
        wanted = fixed.wanted
        raw = logits[wanted.at] if strategies and wanted is not None else None
        changes = fixed.changes(rows)
        if strategies:  # these see what is allowed only, which drawing may leave undone
            ops.adjust_(logits, LogitAdjustments(changes.masks))
        chosen = ops.choose(logits, fixed.rows(rows.position), changes, None if strategies else wanted)
        if strategies:
            failed = choose_(chosen.ids, logits, rows, strategies)
            if raw is not None and wanted is not None:
                chosen = ChosenTokens(chosen.ids, ops.score_chosen(raw, chosen.ids, wanted))
        ids: list[int] = chosen.ids.tolist()
        bad = [row for row, token in enumerate(ids) if token < 0 or row in failed]
        errors = failed
        if (bad and rows.is_adjusted) or (rows.masks is not None and rows.masks.lost):
            errors = failed | _errors(logits, rows, [row for row in bad if row not in failed])
            bad = sorted(errors.keys() | bad)
        if chosen.scores is None:
            return SampledRows(ids, bad, {}, errors)
        logprobs = fixed.read(chosen.scores)
        if bad:
            logprobs = {row: one for row, one in logprobs.items() if row not in bad}
        return SampledRows(ids, bad, logprobs, errors)


def _errors(logits: Tensor, rows: SamplingRows, bad: list[int]) -> dict[int, ServiceError]:
    """Returns the errors that requests caused: a lost grammar, or no allowed token left.

    `logits` are adjusted already.
    """
    masks = rows.masks
    restrictions = (rows.param_rows.allowed, rows.banned, masks)
    restricted = {row for some in restrictions if some is not None for row in some.rows.tolist()}
    empty = [row for row in bad if row in restricted and bool(logits[row].isneginf().all())]
    lost = masks.lost if masks is not None else ()
    return {row: nothing_left() for row in empty} | {row: constraint_lost() for row in lost}
