"""Tokens that sampling strategies choose in place of the sampler's own draw, by logits that are adjusted already."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.sampling.rows import SamplingRows
from sluice_server.kernels.reference.philox import uniforms

# Chooses an id by logits [V] and a number in (0, 1), or returns why it cannot.
Strategy: TypeAlias = Callable[[Tensor, float], "int | ServiceError"]


def choose_(
    ids: Tensor, logits: Tensor, rows: SamplingRows, strategies: Mapping[int, Strategy]
) -> dict[int, ServiceError]:
    """Replaces the ids [R] of the rows in `strategies` by what these choose; returns the errors by row.

    A row without an id (-1) stays as it is: nothing is left to choose from. The number that a strategy gets is the
    noise of the first id behind the vocabulary, which the sampler's own draws do not use.
    """
    at = [row for row, token in enumerate(ids.tolist()) if token >= 0 and row in strategies]
    if not at:
        return {}
    params = rows.param_rows
    seeds, positions, outputs = (
        torch.from_numpy(np.ascontiguousarray(one[at])) for one in (params.seed, rows.position, params.output)
    )
    numbers = uniforms(seeds, positions, outputs, torch.full((len(at), 1), logits.shape[1]))[:, 0].tolist()
    errors = {}
    for row, number in zip(at, numbers, strict=True):
        found = strategies[row](logits[row], number)
        if isinstance(found, ServiceError):
            errors[row] = found
        else:
            ids[row] = found
    return errors
