"""Measures how well the demo models predict held-out text.

In: models and encoded documents. Out: bits per byte, and how often the draft's likeliest token is the target's. Each
    token is predicted once, from at least `LEAST_CONTEXT` tokens before it if the document has them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sluice_server.demo import ngram
from sluice_server.demo.model import Llama

LEAST_CONTEXT = 512  # tokens by which windows of a long document overlap

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Score:
    target_nats: float  # summed over every token
    draft_nats: float
    num_tokens: int  # predicted
    num_agreed: int  # tokens for which both models' likeliest token is the same


@torch.inference_mode()
def score(target: Llama, draft: Llama, documents: Sequence[Ids]) -> Score:
    """Returns the score of both models. Each document begins with the end-of-text id, which is not predicted."""
    target_nats, draft_nats, num_tokens, num_agreed = 0.0, 0.0, 0, 0
    for window, first in windows(documents, target.shape.max_positions):
        inputs, labels = torch.from_numpy(window[None, :-1]), torch.from_numpy(window[first + 1 :])
        wanted, offered = target(inputs)[0, first:], draft(inputs)[0, first:]
        target_nats += nats(wanted, labels)
        draft_nats += nats(offered, labels)
        num_tokens += labels.shape[0]
        num_agreed += int((wanted.argmax(1) == offered.argmax(1)).sum())
    return Score(target_nats, draft_nats, num_tokens, num_agreed)


def nats(logits: Tensor, labels: Tensor) -> float:
    return F.cross_entropy(logits, labels, reduction="sum").item()


def windows(documents: Sequence[Ids], length: int) -> Iterator[tuple[Ids, int]]:
    """Yields windows of at most length + 1 ids, each with the index of the first id whose successor is new."""
    for document in documents:
        begin, first = 0, 0
        while begin + first < document.shape[0] - 1:
            window = document[begin : begin + length + 1]
            yield window, first
            begin, first = begin + length - LEAST_CONTEXT, LEAST_CONTEXT


def bits_per_byte(total_nats: float, num_bytes: int) -> float:
    return total_nats / math.log(2) / num_bytes


def ngram_bits_per_byte(train: Sequence[Ids], held_out: Sequence[Ids], num_symbols: int, num_bytes: int) -> float:
    """Returns the bits per byte of an interpolated Kneser-Ney 5-gram over the same symbols and training split."""
    model = ngram.fit(train, order=5, num_symbols=num_symbols)
    return bits_per_byte(-sum(float(model.log_probabilities(one).sum()) for one in held_out), num_bytes)
