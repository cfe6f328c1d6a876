"""Builds the description of a model that the gateway needs, from the files of a checkpoint."""

from pathlib import Path

from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.request import Limits
from sluice_server.services.checkpoint.pooling_files import read_instruction, read_pooling
from sluice_server.services.gateway.settings import ModelInfo
from sluice_server.services.gateway.tokenizer_files import TokenizerFiles
from sluice_server.services.text_bound import longest_token


def model_info(name: str, revision: str, label: str, directory: Path, model: ModelConfig, limits: Limits) -> ModelInfo:
    """Returns the `ModelInfo` of the model whose files are in `directory`; requests call it `name`."""
    return ModelInfo(
        id=name,
        revision=revision,
        context_length=limits.context_length,
        eos_ids=model.eos_ids,
        defaults=model.defaults,
        architecture=model.architecture,
        label=label,
        longest_token=longest_token(directory / "tokenizer.json"),
        vectors=read_pooling(directory, is_encoder=model.encoder is not None),
        vector_width=model.hidden_size,
        generates=model.generates,
        tokenizer=TokenizerFiles.of(directory),
        labels=model.labels,
        instruction=read_instruction(directory),
    )
