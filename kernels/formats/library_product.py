"""Products of float8 by torch's library (`torch._scaled_mm`) instead of our kernel, where it was measured to be faster.

Measured once for each shape of weight, at load. The library is used where it is faster for that many rows and all
larger numbers measured, and gives the same numbers within a rounding. Our kernel computes all others, and everything
that must be batch-invariant, as the library chooses the order of its sums by the number of rows. Bits of a result
therefore depend on what a start has measured.
"""

import functools
import itertools
import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.formats.packed_weights import Int8Weight

logger = logging.getLogger(__name__)

ROWS = (16, 64, 256, 1024, 4096)  # numbers of rows that are measured
GAIN = 0.95  # of our kernel's time, below which the library is used
WARM_RUNS, RUNS = 3, 7
TOLERANCE = 0.02  # of the largest number of a result: a rounding of bfloat16, and sums in another order
MULTIPLE = 16  # of which the library wants inputs and outputs to be

Seconds = Callable[[Callable[[], object]], float]


def by_library(rows: Int8Weight, packed: Int8Weight, dtype: torch.dtype) -> Tensor:
    """Multiplies float8 rows [M, K] by a float8 weight [N, K], each with a scale for each row: [M, N]."""
    scales = rows.scales[:, None], packed.scales[None]
    y: Tensor = torch._scaled_mm(rows.weight, packed.weight.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
    return y


def by_kernel(rows: Int8Weight, packed: Int8Weight, dtype: torch.dtype) -> Tensor:
    """Computes the same with our kernel."""
    y: Tensor = gpu.family("linear8").multiply(rows, packed, None, dtype)
    return y


@functools.cache
def measured_rows(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> int | None:
    """Returns the least number of rows for which the library computes products of that shape; None if it never does.

    Measures on the device at the first call for a shape.
    """
    if dtype is not torch.bfloat16 or outputs % MULTIPLE or inputs % MULTIPLE:
        return None
    packed = Int8Weight(*_random(outputs, inputs, device))

    def given(num: int) -> tuple[Int8Weight, Int8Weight, torch.dtype]:
        return Int8Weight(*_random(num, inputs, device)), packed, dtype

    return least_faster(ROWS, given, by_kernel, by_library, device_seconds, "float8")


def least_faster(
    sizes: Sequence[int],
    given: Callable[[int], Sequence[Any]],
    ours: Callable[..., Tensor],
    theirs: Callable[..., Tensor],
    seconds: Seconds,
    what: str,
) -> int | None:
    """Returns the least of ascending sizes from which on the library is faster; None if it is not for the last.

    It must give the same numbers. `given` returns the arguments of both for a size, and `seconds` measures a call.
    """
    found = None
    for num in reversed(sizes):
        arguments = given(num)
        try:
            if not _agree(ours(*arguments), theirs(*arguments)):
                logger.warning("torch's products of %s differ from ours for %d rows: they are not used", what, num)
                break
        except RuntimeError as error:  # this GPU or version has none
            logger.info("torch has no products of %s for %d rows here: %s", what, num, error)
            break
        own, other = (seconds(functools.partial(one, *arguments)) for one in (ours, theirs))
        if other > GAIN * own:
            break
        found = num
    return found


def device_seconds(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes on the current CUDA device, the median of some runs."""
    for _ in range(WARM_RUNS):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    taken: list[float] = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return statistics.median(taken) / 1000


def _random(num: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns rows of float8 and their scales."""
    generator = torch.Generator(device).manual_seed(num)
    rows = torch.randn(num, width, device=device, generator=generator).to(torch.float8_e4m3fn)
    return rows, torch.rand(num, device=device, generator=generator) + 0.5


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    largest = ours.float().abs().amax()
    return bool((ours.float() - theirs.float()).abs().amax() <= TOLERANCE * largest)
