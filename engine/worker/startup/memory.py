"""Measures once at start how much GPU memory is left for the cache, by computing the largest possible step.

`cache_bytes` is the arithmetic, `cuda_cache_bytes` measures a device. `at_start` turns a lack of memory into a
ServiceError that names the setting.
"""

import contextlib
import gc
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from sluice_server.engine.errors import Code, OutOfDeviceMemory, ServiceError
from sluice_server.engine.models.layers.device_sides import DeviceTables
from sluice_server.engine.models.model import Model
from sluice_server.engine.sampling.logprobs import score
from sluice_server.engine.worker.faults import device_faults
from sluice_server.engine.worker.slots.prompts import CHUNK
from sluice_server.kernels.layout.metadata import AttentionMetadata


class StepRows(NamedTuple):
    """Attributes:
    most: sequences at most.
    length: tokens of a sequence at most; no position lies beyond.
    block: tokens of a block.
    """

    most: int
    length: int
    block: int


def cuda_cache_bytes(  # noqa: PLR0913 # all that takes memory
    model: Model,
    cache_dtype: torch.dtype,
    max_tokens: int,
    rows: StepRows,
    recorded: int,
    utilization: float,
    adapters: DeviceTables | None = None,
) -> int:
    """Returns the bytes for the cache beside a loaded model and `recorded` bytes of steps that are recorded later.

    Steps of other sizes run before the largest one, so that their kernels are compiled now. Raises ServiceError naming
    the setting when no memory is left.
    """
    device = model.device
    give_back_unused()
    torch.cuda.reset_peak_memory_stats(device)
    for num in ladder(max_tokens):
        whole_step(model, cache_dtype, num, rows)
        if adapters is not None:
            whole_step(model, cache_dtype, num, rows, adapters)
    torch.cuda.synchronize(device)
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return cache_bytes(total, free + reserved, peak, recorded, utilization)


def give_back_unused() -> None:
    """Releases the memory that torch caches for later tensors, so that the device's free memory can be measured."""
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def at_start(flag: str, what: str) -> Iterator[None]:
    """A context in which a lack of device memory for `what` raises ServiceError INVALID_SETTING naming the flag."""
    try:
        with device_faults():
            yield
    except OutOfDeviceMemory as error:
        name = flag.removeprefix("--").replace("-", "_")
        text = f"{flag}: no memory for {what}, or use a device with more"
        raise ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", text, field=name) from error


def ladder(most: int) -> list[int]:
    """Returns the step sizes to run: powers of two, and the largest.

    Kernels do not change their schedule in between.
    """
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def prompts_of(tokens: int, length: int) -> list[int]:
    """Returns the lengths of as few prompts as make so many tokens, none over `length`, the shorter ones first."""
    num = -(-tokens // length)
    return sorted(tokens * (at + 1) // num - tokens * at // num for at in range(num))


def whole_step(
    model: Model, cache_dtype: torch.dtype, max_tokens: int, rows: StepRows, adapters: DeviceTables | None = None
) -> None:
    """Computes prompts that fill a step, logits of as many rows as there may be and one chunk of prompt scores; with
    `adapters` beside those of a slot, which are none yet: their kernels are compiled."""
    lengths = prompts_of(max_tokens, rows.length)
    width = -(-lengths[-1] // rows.block)
    cache = model.new_cache(width * len(lengths), rows.block, cache_dtype)
    tables = np.arange(width * len(lengths), dtype=np.int32).reshape(-1, width)
    meta = AttentionMetadata.build(lengths, lengths, tables, rows.block, model.device)
    ids = torch.zeros(max_tokens, dtype=torch.int64, device=model.device)
    sides = None if adapters is None else adapters.sides(ids)
    hidden = model.forward(ids, meta.positions, cache, meta, sides=sides)
    model.logits(hidden[:1].expand(rows.most, -1).contiguous())
    chunk = hidden[:CHUNK]
    score(model.logits(chunk), [0] * len(chunk), 1)


def cache_bytes(total: int, available: int, peak: int, recorded: int, utilization: float) -> int:
    """Returns the bytes for the cache.

    Args:
        total: bytes of the device.
        available: bytes that other processes have not taken, all of ours included.
        peak: bytes in use at once by weights and the largest step.
        recorded: bytes that recorded steps will have taken.
        utilization: share of the device that may be used at all.

    Raises ServiceError naming the setting when nothing is left.
    """
    left = int(total * utilization) - (total - available) - peak - recorded
    if left > 0:
        return left
    raise ServiceError(
        Code.FAILED_PRECONDITION,
        "INVALID_SETTING",
        f"--gpu-memory-utilization: {utilization} of {total >> 20} MiB, of which others hold "
        f"{(total - available) >> 20} MiB, leaves no cache beside {peak >> 20} MiB of weights and the largest step "
        f"and {recorded >> 20} MiB of recorded steps; raise it, lower --max-num-batched-tokens or --max-num-seqs, or "
        "use a larger GPU",
        field="gpu_memory_utilization",
    )
