"""Measures once at start how fast this machine moves cache blocks and computes tokens, for the cost of preemption."""

import time
from collections.abc import Callable

import numpy as np
import torch

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.models.model import Model
from sluice_server.engine.scheduler.costs import PreemptionCosts
from sluice_server.kernels.layout.metadata import AttentionMetadata

NUM_TOKENS = 16  # length of the timed prefill: enough for matrix products, short for a large model too
RUNS = 3


def measure_costs(model: Model, store: BlockStore, block_size: int) -> PreemptionCosts:
    """Times a copy of block 0 to host memory and back, and a short prefill into it.

    The cache must not be in use yet.
    """
    there_and_back = [Move(MoveKind.SAVE, 0, 0), Move(MoveKind.RESTORE, 0, 0)]
    move_s = min(_timed(lambda: store.move(there_and_back), model.device) for _ in range(RUNS))
    num = min(NUM_TOKENS, block_size)
    prefill = _tokens(model, store.cache, block_size, num)
    compute_s = min(_timed(prefill, model.device) for _ in range(RUNS))
    return PreemptionCosts(store.block_bytes, 2 * store.block_bytes / move_s, num / compute_s)


def one_token(model: Model, cache: list[torch.Tensor], block_size: int) -> Callable[[], object]:
    """Returns a function that computes one token, and its logits, in block 0 of a cache that is not used otherwise."""
    hidden = _tokens(model, cache, block_size, 1)
    return lambda: model.logits(hidden())


def _tokens(model: Model, cache: list[torch.Tensor], block_size: int, num: int) -> Callable[[], torch.Tensor]:
    meta = AttentionMetadata.build([num], [num], np.zeros((1, 1), dtype=np.int32), block_size, model.device)
    ids = torch.zeros(num, dtype=torch.int64, device=model.device)
    return lambda: model.forward(ids, meta.positions, cache, meta)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - start, 1e-9)
