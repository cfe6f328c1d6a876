"""How far the predictions of a format are from those of a reference: perplexity, divergence, and same first choice.

Needs numpy alone: peers measure themselves with it, in environments of their own.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """Attributes:
    perplexity: e to the mean surprise of a token.
    more: perplexity over that of the reference, less 1.
    divergence: mean Kullback-Leibler divergence of the reference's predictions from these.
    same: share of positions whose likeliest token is that of the reference.
    """

    perplexity: float
    more: float
    divergence: float
    same: float


def log_softmax(logits: Array) -> Array:
    """Log probabilities of logits [T, V]."""
    shifted: Array = logits - logits.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def compare(windows: Sequence[Sequence[int]], logits: Iterable[Array], reference: Sequence[Array]) -> Quality:
    """Compares logits [T, V] of each window with the reference's log probabilities."""
    surprise, expected, divergence, same, num = 0.0, 0.0, 0.0, 0, 0
    for ids, found, right in zip(windows, logits, reference, strict=True):
        own, at = log_softmax(found), (np.arange(len(ids) - 1), np.asarray(ids[1:]))
        surprise -= float(own[at].sum(dtype=np.float64))
        expected -= float(right[at].sum(dtype=np.float64))
        divergence += float((np.exp(right) * (right - own)).sum(dtype=np.float64))
        same += int((own.argmax(1) == right.argmax(1)).sum())
        num += len(ids)
    scored = num - len(windows)
    return Quality(
        math.exp(surprise / scored), math.exp((surprise - expected) / scored) - 1, divergence / num, same / num
    )
