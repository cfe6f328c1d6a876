"""Loads drafters: a smaller model with the same vocabulary, or a head that reads the target's hidden states.

Both compute one entry per token into cache blocks beside the target's. A model's entry is of the token itself. A head's
entry is of the token behind it and of the target's hidden states at its position, so a head lags by one. Raises
ServiceError for drafters that do not fit the target.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import read_head_config
from sluice_server.engine.models.eagle import EagleHead, default_behind, load_head
from sluice_server.engine.models.layers.loader import Pack
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model, hooks_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import Limits
from sluice_server.kernels.layout.metadata import AttentionMetadata


class Drafter(Protocol):
    """Computes drafts.

    Attributes:
        lag: entries by which it is behind the existing tokens.
        context_length: entries of one sequence at most.
        vocab_size: of the logits.
        hidden_size: of the hidden states.
    """

    lag: int
    context_length: int
    vocab_size: int
    hidden_size: int
    device: torch.device

    def token_bytes(self, cache: torch.dtype) -> int:
        """Returns the bytes per token of a `new_cache` of that dtype."""

    def new_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> list[Tensor]:
        """Returns tensors [num_blocks + 1, …], which are moved with the target's."""

    def read_from(self, cache: list[Tensor]) -> None:
        """Makes the target write into this cache what the drafter reads of it, from now on."""

    def forward(self, ids: Tensor, cache: list[Tensor], meta: AttentionMetadata, states: Tensor | None) -> Tensor:
        """Returns hidden states [T, hidden] of ids int64 [T].

        `states` [T, hidden]: those of the entries before, where the target has computed none.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of hidden [R, hidden]: float32 [R, vocab]."""


class ModelDrafter:
    """Drafts with a whole model, which needs only the tokens."""

    lag = 0

    def __init__(self, model: Model) -> None:
        self._model = model
        self.device = model.device
        self.context_length, self.vocab_size = model.config.context_length, model.config.vocab_size
        self.hidden_size = model.config.hidden_size
        self.token_bytes, self.new_cache, self.logits = model.token_bytes, model.new_cache, model.logits

    def read_from(self, cache: list[Tensor]) -> None:
        """Implements `Drafter.read_from`: tokens are all that it reads."""

    def forward(self, ids: Tensor, cache: list[Tensor], meta: AttentionMetadata, states: Tensor | None) -> Tensor:
        """Implements `Drafter.forward`."""
        return self._model.forward(ids, meta.positions, cache, meta)


class HeadDrafter:
    """Drafts with an EAGLE-3 head; the target writes its hidden states into the head's cache."""

    lag = 1

    def __init__(self, head: EagleHead, target: Model) -> None:
        self._head = head
        self._target = target
        self.device = head.device
        self.context_length, self.vocab_size = head.config.context_length, head.config.vocab_size
        self.hidden_size, self.new_cache = head.config.hidden_size, head.new_cache
        self.token_bytes, self.forward, self.logits = head.token_bytes, head.forward, head.logits

    def read_from(self, cache: list[Tensor]) -> None:
        """Implements `Drafter.read_from`: the target's hidden states."""
        behind, first = self._head.behind, self._target.layers.start
        self._target.hidden_state_hooks = hooks_of(behind, cache[1].flatten(0, 1))
        self._target.passed_on = tuple(num for num in sorted(behind) if num <= first)


def load_drafter(
    kind: str,
    directory: Path,
    target: Model,
    limits: Limits,
    pack: Pack,
    embeddings: Callable[[], Tensor] | None = None,
) -> Drafter:
    """Loads the drafter for `target`; `kind` is draft or eagle. `embeddings` returns the target's, of all ids; None:
    the target has them.

    Raises ServiceError INVALID_SETTING if it does not fit; the message holds both numbers.
    """
    if kind == "eagle":
        return _load_head(directory, target, limits, pack, embeddings)
    config = read_served(directory)
    num_positions = min(limits.context_length, config.context_length)
    draft = load_model(directory, config, target.dtype, target.device, num_positions, pack)
    _check_vocabulary(draft.config.vocab_size, target)
    _check_size(draft.num_parameters, target)
    return ModelDrafter(draft)


def _load_head(
    directory: Path, target: Model, limits: Limits, pack: Pack, embeddings: Callable[[], Tensor] | None
) -> Drafter:
    config = read_head_config(directory)
    _check_vocabulary(config.layer.vocab_size, target)
    ours, theirs = config.layer.hidden_size, target.config.hidden_size
    if ours != theirs:
        raise _unfit(
            f"reads hidden states of {ours} numbers, the model has {theirs}: choose a head made for this model"
        )
    if config.draft_vocab_size > config.layer.vocab_size:
        raise _unfit(f"proposes {config.draft_vocab_size} ids, the model has {config.layer.vocab_size}")
    behind, num = config.behind or default_behind(target.num_layers), target.num_layers
    if len(set(behind)) != 3 or not all(1 <= one <= num for one in behind):
        raise _unfit(
            f"reads behind the layers {', '.join(map(str, behind))}; it takes three in 1 to {num}, all different"
        )
    head = load_head(directory, target, min(limits.context_length, config.layer.context_length), pack, embeddings)
    _check_size(head.num_parameters, target)
    return HeadDrafter(head, target)


def _check_vocabulary(ours: int, target: Model) -> None:
    theirs = target.config.vocab_size
    if ours != theirs:
        raise _unfit(f"has a vocabulary of {ours} ids, the model {theirs}: choose a draft that shares its tokenizer")


def _check_size(ours: int, target: Model) -> None:
    if ours > target.num_parameters:
        raise _unfit(f"has {ours} parameters, the model {target.num_parameters}: a draft must be the smaller one")


def _unfit(message: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", f"--draft-model: {message}", field="draft_model")
