"""A device of CPU tensors with the device protocol and a log of what was begun in which order. Work is done when it is
begun; a download has to be waited for."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged, SharedPrefixRows
from sluice_server.kernels.reference import (
    adjust,
    definitions,
    elementwise,
    gemv,
    inputs,
    moe,
    peer_sums,
    sampling,
    scores,
    speculation,
)


class HostDevice:
    """See `engine.worker.device.Device`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.bytes = 0  # in use
        self._pinned: list[Tensor] = []

    def upload(self, values: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(values.copy())

    def download(self, values: Tensor) -> "HostArrival":
        """As on a real device there is memory for two downloads: the third overwrites the first."""
        memory = values.clone()
        self._pinned.append(memory)
        if len(self._pinned) > 2:
            self._pinned.pop(0).fill_(-99)
        self.log.append("download")
        return HostArrival(self.log, memory)

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        self.log.append("capture")
        body()

        def replay() -> None:
            self.log.append("replay")
            body()

        return replay

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        self.log.append("aside")
        yield

    def join(self) -> None:
        self.log.append("join")

    def taken(self) -> int:
        return self.bytes


class HostArrival:
    """See `engine.worker.device.HostCopy`."""

    def __init__(self, log: list[str], values: Tensor) -> None:
        self._log = log
        self._values = values

    @property
    def is_there(self) -> bool:
        return True

    def wait(self) -> "np.ndarray[Any, Any]":
        self._log.append("wait")
        return self._values.numpy().copy()


def reference_family(name: str) -> object:
    """The torch reference implementations in place of a family of Triton kernels, with the interface of a GPU."""
    families: dict[str, object] = {
        "attention": types.SimpleNamespace(paged_attention=_attend),
        "kv_write": types.SimpleNamespace(rotate_and_write=_write),
        "embedding": types.SimpleNamespace(embedding=lambda ids, table: table[ids]),
        "norm": elementwise,
        "activation": elementwise,
        "gemv": gemv,
        "moe": moe,
        "peer_sums": peer_sums,
        "inputs": inputs,
        "sampling": sampling,
        "adjust": adjust,
        "scores": scores,
        "speculation": speculation,
    }
    return families[name]


def _attend(q: Tensor, cache: Tensor, batch: Ragged, options: AttentionOptions, scales: Tensor | None = None) -> Tensor:
    assert scales is None
    if batch.shared is not None:
        _check_shared(batch, batch.shared, cache.shape[1])
    out = torch.zeros(len(q), q.shape[1] * q.shape[2])
    out[: batch.num_tokens] = definitions.ragged_attention(q, cache, batch, options).float()
    return out


def _check_shared(batch: Ragged, shared: SharedPrefixRows, block: int) -> None:
    """Checks that rows have the blocks that they are said to share, in order."""
    lengths = torch.zeros(batch.num_rows, dtype=torch.int32)
    for group, length in enumerate(shared.lengths.tolist()):
        first, end = shared.starts[group : group + 2].tolist()
        num = length // block
        assert (batch.tables[first:end, :num] == shared.tables[group, :num]).all() and length % block == 0
        lengths[first:end] = length
    assert torch.equal(lengths, shared.prefixes)
    assert (shared.prefixes < batch.contexts).logical_or(shared.prefixes == 0).all()
    assert shared.max_rows >= shared.starts.diff().max() and shared.max_length >= shared.lengths.max()


def _write(
    heads: Tensor,
    cis: Tensor,
    cache: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
    norms: elementwise.HeadNorms | None = None,
) -> None:
    assert scales is None
    if norms is not None:
        elementwise.norm_heads_(heads, norms)
    _, block, _, kv_heads, dim = cache.shape
    definitions.rope_(heads[:, :-kv_heads], cis)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache[slot // block, slot % block] = heads[token, -2 * kv_heads :].view(2, kv_heads, dim)
