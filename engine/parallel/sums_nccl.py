"""Sums of ranks whose tensors are on GPUs, over NCCL: partial sums are gathered, and every rank adds them in order.

NCCL's own sums would depend on how it cuts them. Calls only put work into the device's queue: no number comes back to
the host, so that sums can be part of a recorded step. A rank that ends or hangs is noticed elsewhere: rank 0 waits for
the others' word of each launch, and NCCL's watchdog ends a process whose queue does not go on. Ranks find one another
by a store that the caller gives.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as dist

from sluice_server.engine.parallel.sums import TIMEOUT_S, KernelSums, RankSums, SumsBroken, add_in_order, check_shards

UNKNOWN = -1  # NCCL does not say which rank is at fault


class Collectives(Protocol):
    """What these sums use of a process group of torch; gloo's is one too, for tensors of the host."""

    def _allgather_base(self, output: Tensor, own: Tensor, options: Any, /) -> Any:  # noqa: ANN401 # untyped
        """Begins to collect what each rank has, side by side in `output` on all."""

    def broadcast(self, tensors: list[Tensor], options: Any, /) -> Any:  # noqa: ANN401 # untyped
        """Begins to send those of one rank to all."""


def sums_of_devices(sums: RankSums | None) -> "NcclSums | None":
    """Returns sums of ranks with a GPU each as what they are; None for others."""
    return sums if isinstance(sums, NcclSums) else None


def nccl_group(store: dist.Store, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> Collectives:
    """Returns the process group of ranks with a GPU each, which share `store`. Raises ValueError without NCCL."""
    try:
        backend: Any = dist.ProcessGroupNCCL
    except AttributeError:
        raise ValueError("this build of torch has no NCCL: install one for CUDA") from None
    options = backend.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group: Collectives = backend(store, rank, size, options)
    return group


class NcclSums:
    """The sums of one rank on a device; see `RankSums`.

    Attributes:
        timeout_s: until ranks that do not come are given up, where a call waits for them on the host.
        seconds: stays 0: what sums take is the device's time.
        calls: collectives that were put into the queue, or recorded, so far; ranks in step have equal numbers.
        in_kernels: None: those kernels are a processor's.
    """

    in_kernels: KernelSums | None = None

    def __init__(  # what a group is made of
        self,
        group: Collectives,
        rank: int,
        size: int,
        device: torch.device,
        *,
        shards: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`shards` 0 is one for each rank. Raises ValueError for numbers that do not fit."""
        check_shards(size, shards or size)
        self.rank = rank
        self.size = size
        self.shards = shards or size
        self.device = device
        self.timeout_s = timeout_s
        self.seconds = 0.0
        self.calls = 0
        self._group = group
        self._widths: dict[int, list[int]] = {}  # of all ranks, by their sum
        self._base = torch.empty(0, device=device)
        self._room: Sequence[Tensor] = ()

    def room(self, rows: int, width: int) -> Sequence[Tensor]:
        """Implements `RankSums.room`: side by side, so that they travel as they are."""
        self._base = torch.empty(self.shards // self.size, rows, width, device=self.device)
        self._room = self._base.unbind()
        return self._room

    def add(self, into: Tensor, partials: Sequence[Tensor], *, is_exact: bool = False) -> None:
        """Implements `RankSums.add`."""
        own = self._base if partials is self._room else torch.stack(list(partials))
        add_in_order(into, self._gathered(own).flatten(0, 1).unbind())

    def gather(self, part: Tensor, total: int) -> Tensor | None:
        """Implements `RankSums.gather`. The ranks' numbers of columns are asked for once for each sum of them."""
        width = part.shape[1]
        widths = self._widths.get(total)
        if widths is None:
            widths = self._widths[total] = self._numbers(width)
        padded = torch.nn.functional.pad(part, (0, max(widths) - width)).contiguous()
        found = self._gathered(padded)
        if self.rank:
            return None
        return torch.cat([one[:, :num] for one, num in zip(found.unbind(), widths, strict=True)], 1)

    def agree(self, ok: bool) -> bool:
        """Implements `RankSums.agree`; waits for the device."""
        return all(self._numbers(int(ok)))

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values; waits for the device."""
        return min(self._numbers(value))

    def sampled_ids(self, num: int, choose: Callable[[], Tensor]) -> Tensor:
        """Implements `SampledIds`: rank 0 samples, and the others get its ids."""
        return self.share(torch.empty(num, dtype=torch.int64, device=self.device) if self.rank else choose())

    def share(self, ids: Tensor) -> Tensor:
        """Returns rank 0's ids, int64 [S], for which others give room: what it sampled, before the host knows it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=self.timeout_s)
        self._put(lambda: self._group.broadcast([ids], options).wait())
        return ids

    def _numbers(self, own: int) -> list[int]:
        """Returns the numbers of all ranks, on the host."""
        found = self._gathered(torch.tensor([own], device=self.device))
        return [int(one) for one in found.flatten().tolist()]

    def _gathered(self, own: Tensor) -> Tensor:
        """Returns what all ranks give, in their order; all of one size."""
        found = own.new_empty(self.size * own.shape[0], *own.shape[1:])
        options = dist.AllgatherOptions()
        options.timeout = timedelta(seconds=self.timeout_s)
        self._put(lambda: self._group._allgather_base(found, own, options).wait())
        return found.view(self.size, *own.shape)

    def _put(self, collective: Callable[[], object]) -> None:
        """Puts a collective into the device's queue, before all that follows; gloo's waits here."""
        self.calls += 1
        try:
            collective()
        except RuntimeError as error:
            text = f"a rank of {self.size} has ended, or did not come to a sum: start the group anew"
            raise SumsBroken(UNKNOWN, f"{text} ({str(error).splitlines()[0]})") from error
