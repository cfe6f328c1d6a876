"""Sums of ranks on different hosts, over gloo: partial sums travel, and every rank adds all of them in their order.

Gloo's own sums would depend on how it cuts them. Ranks find one another by a store that the caller gives (torch's TCP
store would listen on every address), and gloo listens on the one address that it is told. Partial sums may travel
rounded: that changes results, in the same way on every rank.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as dist

from sluice_server.engine.parallel.sums import TIMEOUT_S, KernelSums, SumsBroken, add_in_order, check_shards, new_room

GROUP = 64  # numbers that share a scale where sums travel as int8
LEVELS = 127
UNKNOWN = -1  # gloo does not say which rank is at fault


@dataclasses.dataclass(frozen=True, slots=True)
class SumDtype:
    """A form in which partial sums travel: `pack` makes bytes of float32 numbers [N], `unpack` is given N too."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, int], Tensor]


def _pack_int8(numbers: Tensor) -> Tensor:
    """Rounds numbers to 8 bits with a scale for each group; a group with an infinity or a NaN becomes NaN."""
    groups = torch.nn.functional.pad(numbers, (0, -len(numbers) % GROUP)).view(-1, GROUP)
    scales = groups.abs().amax(1, keepdim=True) / LEVELS
    scales = torch.where(scales.isfinite(), scales, float("nan"))
    levels = (groups / scales).nan_to_num(0.0, 0.0, 0.0).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return torch.cat((levels.view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()))


def _unpack_int8(packed: Tensor, num: int) -> Tensor:
    size = -(-num // GROUP) * GROUP
    levels, scales = packed[:size].view(torch.int8), packed[size:].clone().view(torch.float32)
    return (levels.view(-1, GROUP).float() * scales[:, None]).flatten()[:num]


DTYPES: Mapping[str, SumDtype] = {  # values of --sum-dtype
    "float32": SumDtype(lambda numbers: numbers.view(torch.uint8), lambda packed, num: packed.view(torch.float32)),
    "bfloat16": SumDtype(
        lambda numbers: numbers.bfloat16().view(torch.uint8), lambda packed, num: packed.view(torch.bfloat16).float()
    ),
    "int8": SumDtype(_pack_int8, _unpack_int8),
}
_EXACT = DTYPES["float32"]


class GlooSums:
    """The sums of one rank over gloo; see `RankSums`.

    Attributes:
        in_kernels: None, as the kernels reach no other host.
        timeout_s: until ranks that do not come are given up; may be changed between sums.
        seconds: spent in sums since start, waiting included.
    """

    in_kernels: KernelSums | None = None

    def __init__(  # noqa: PLR0913 # what a group is made of
        self,
        store: dist.Store,
        rank: int,
        size: int,
        address: str,
        *,
        shards: int = 0,
        dtype: str = "float32",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Joins the group whose ranks share `store`, and listens on `address` alone; `shards` 0 is one for each rank.

        Raises ValueError for sizes or a `dtype` that do not fit, and SumsBroken if the other ranks do not come in time.
        """
        check_shards(size, shards or size)
        if dtype not in DTYPES:
            raise ValueError(f"sums cannot travel as {dtype!r}: take {', '.join(DTYPES)}")
        self.rank = rank
        self.size = size
        self.shards = shards or size
        self.timeout_s = timeout_s
        self.seconds = 0.0
        self._dtype = DTYPES[dtype]
        backend: Any = dist.ProcessGroupGloo  # typed without its options and its collectives
        options = backend._Options()
        options._devices = [backend.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            self._group = backend(store, rank, size, options)
        except RuntimeError as error:
            raise self._broken(error) from error

    def room(self, rows: int, width: int) -> Sequence[Tensor]:
        """Implements `RankSums.room`."""
        return new_room(self.shards // self.size, rows, width)

    def add(self, into: Tensor, partials: Sequence[Tensor], *, is_exact: bool = False) -> None:
        """Implements `RankSums.add`."""
        dtype = _EXACT if is_exact else self._dtype
        own = torch.cat([one.flatten() for one in partials])
        each = [dtype.unpack(packed, len(own)) for packed in self._exchange(dtype.pack(own))]
        add_in_order(into, [part.view(into.shape) for given in each for part in given.chunk(len(partials))])

    def gather(self, part: Tensor, total: int) -> Tensor | None:
        """Implements `RankSums.gather`."""
        rows, width = part.shape
        sizes = torch.stack(self._exchange(torch.tensor([rows, width]))).tolist()
        other = next((rank for rank, size in enumerate(sizes) if size[0] != sizes[0][0]), None)
        if other is not None:
            raise SumsBroken(other, f"rank {other} gives {sizes[other][0]} rows, rank 0 gives {sizes[0][0]}")
        widest = max(width for _, width in sizes)
        padded = torch.nn.functional.pad(part, (0, widest - width)).contiguous()
        found = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=self.timeout_s)
        self._wait(lambda: self._group.gather([found] if found else [], [padded], options))
        return torch.cat([one[:, : size[1]] for one, size in zip(found, sizes, strict=True)], 1) if found else None

    def agree(self, ok: bool) -> bool:
        """Implements `RankSums.agree`."""
        return all(bool(one) for one in self._exchange(torch.tensor([int(ok)])))

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """Returns what all ranks give, in their order; all of one size."""
        found = [torch.empty_like(own) for _ in range(self.size)]
        options = dist.AllgatherOptions()
        options.timeout = timedelta(seconds=self.timeout_s)
        self._wait(lambda: self._group.allgather([found], [own], options))
        return found

    def _wait(self, begin: Callable[[], Any]) -> None:
        start = time.perf_counter()
        try:
            begin().wait()
        except RuntimeError as error:
            raise self._broken(error) from error
        finally:
            self.seconds += time.perf_counter() - start

    def _broken(self, error: RuntimeError) -> SumsBroken:
        reason = str(error).splitlines()[0]
        text = f"a rank of {self.size} has ended, or did not come to a sum within {self.timeout_s:g} s"
        return SumsBroken(UNKNOWN, f"{text}: start the group anew ({reason})")
