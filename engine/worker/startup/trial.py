"""Computes a model's first tokens at start and checks that their logits are finite.

Finite weights may still be too large for each other, or belong to another config.json.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sluice_server.engine.models.fields import invalid_model
from sluice_server.engine.speculation.drafters import Drafter
from sluice_server.kernels.layout.metadata import AttentionMetadata

NUM_TOKENS = 4  # enough for attention over other tokens, hardly more work than one


def check_trial(directory: Path, model: Drafter, cache: list[Tensor], block_size: int, token: int = 0) -> None:
    """Computes `token` and some more in block 0 of a cache that is not in use yet.

    Raises ServiceError MODEL_INVALID if their logits are not finite.
    """
    logits = trial(model, cache, block_size, token)
    if not bool(logits.amax(1).isfinite().all()):
        text = "the first tokens have no finite logits: weights are too large, or belong to another config.json"
        raise invalid_model(directory, f"{text}; download the checkpoint again")


def trial(model: Drafter, cache: list[Tensor], block_size: int, token: int, has_head: bool = True) -> Tensor:
    """Returns the logits of the trial's tokens, or their hidden states where another stage has the head."""
    num = min(NUM_TOKENS, block_size, model.context_length, model.vocab_size)
    meta = AttentionMetadata.build([num], [num], np.zeros((1, 1), dtype=np.int32), block_size, model.device)
    ids = (torch.arange(num, device=model.device) * (model.vocab_size // num) + token) % model.vocab_size
    hidden = model.forward(ids, cache, meta, None)
    return model.logits(hidden) if has_head else hidden
