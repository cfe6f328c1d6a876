"""Loads models from checkpoints.

`load_model` reads a checkpoint; `plan_model` builds the same on the meta device from shapes alone.
"""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.fields import MENDING, invalid_model
from sluice_server.engine.models.gguf.checkpoint import GgufCheckpoint, gguf_files
from sluice_server.engine.models.layers.loader import Pack
from sluice_server.engine.models.model import Model, owned
from sluice_server.engine.models.offload.store import IN_MEMORY, LayerStore
from sluice_server.engine.models.registry import Traits, traits_of
from sluice_server.engine.models.weights import Checkpoint, PlannedWeights
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import unusable
from sluice_server.engine.parallel.sharded import LAYERS
from sluice_server.kernels.formats.packer import PLAIN


class ModelCode(Protocol):
    """The code of an architecture that is not this package's own."""

    @property
    def traits(self) -> Traits:
        """Returns the traits of a checkpoint."""

    @property
    def model(self) -> type[Model]:
        """The class of the model."""


def load_model(  # noqa: PLR0913 # all that a model is made of
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int = 0,
    pack: Pack = PLAIN,
    code: ModelCode | None = None,
    ranks: Ranks | None = None,
    store: LayerStore = IN_MEMORY,
) -> Model:
    """Loads a checkpoint, or a rank's part of it.

    `num_positions` bounds the rotary table; 0 is the model's context. `pack` packs each weight. `code` is
    that of a plugin's architecture, whose layers `store` does not take. Raises ServiceError MODEL_INVALID naming file
    and tensor, UNIMPLEMENTED for an architecture, or INVALID_SETTING for ranks that cannot share the model out.
    """
    traits = traits_of(config, None if code is None else code.traits)  # raises before any weight is read
    if ranks is not None:
        ranks.shape.check(config)
        if code is not None:
            raise unusable("plugins", f"{config.architecture} is a plugin's, whose tensors ranks cannot share out")
    source = open_checkpoint(directory, config, dtype, device)
    check_layers(directory, config, source)
    given = (config, source, dtype, device, num_positions or config.context_length, pack, traits)
    model = Model(*given, ranks, store) if code is None else code.model(*given)
    has_all = ranks is None or (not ranks.shape.expert_parallel and ranks.shape.pipeline_size == 1)  # of every tensor
    model.num_parameters = source.num_parameters if has_all else plan_model(config, dtype).num_parameters
    model.notes += source.notes
    return model


def embeddings_of(directory: Path, config: ModelConfig, model: Model) -> Tensor:
    """Returns the embeddings of all ids, of which a rank's part of a model has some."""
    if len(model.embeddings) == config.vocab_size:
        return model.embeddings
    source = open_checkpoint(directory, config, model.dtype, model.device)
    return owned(source.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)))


def open_checkpoint(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Checkpoint | GgufCheckpoint:
    """Opens the weights of a directory, in safetensors or GGUF."""
    files = gguf_files(directory)
    if not files and config.stored is not None and config.stored.method == "gguf":
        raise invalid_model(directory, f"holds no model*.gguf, which its quantization_config names: {MENDING}")
    return GgufCheckpoint(files, dtype, device) if files else Checkpoint(directory, dtype, device, config.stored)


def check_layers(directory: Path, config: ModelConfig, source: Checkpoint | GgufCheckpoint) -> None:
    """Raises ServiceError if the files hold more or fewer layers than config.json says; reads no tensor."""
    held, said = source.layers(LAYERS), config.num_layers
    missing = next((num for num in range(said) if num not in held), None)
    if held and (missing is not None or len(held) > said):
        what = f"no tensor of layer {missing}" if missing is not None else f"tensors of layer {max(held)}"
        text = f"num_hidden_layers is {said}, and the files hold {what}, counted from 0: {MENDING}"
        raise invalid_model(directory / "config.json", text)


def plan_model(config: ModelConfig, dtype: torch.dtype) -> PlannedWeights:
    """Returns names and shapes of all tensors that loading would read; allocates nothing."""
    plan = PlannedWeights(dtype)
    Model(config, plan, dtype, torch.device("meta"), num_positions=1)
    return plan
