"""Makes the configuration files of a checkpoint directory from the metadata of a GGUF file."""

import tempfile
from pathlib import Path

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.fields import Json
from sluice_server.engine.models.gguf.reader import GgufHeader
from sluice_server.engine.models.registry import read_served
from sluice_server.services.checkpoint.gguf.config import is_quantised, make_config, make_generation_config
from sluice_server.services.checkpoint.gguf.dumping import dump
from sluice_server.services.checkpoint.gguf.tokenizer import make_tokenizer, make_tokenizer_config

QUANTISED: Json = {"quant_method": "gguf"}


def make_configuration(header: GgufHeader, *, is_widened: bool = False) -> dict[str, dict[str, Json]]:
    """Returns the configuration files by name. `is_widened`: whether the weights will not be quantised any more."""
    config = make_config(header)
    if is_quantised(header) and not is_widened:
        config["quantization_config"] = QUANTISED
    found = {
        "config.json": config,
        "generation_config.json": make_generation_config(header),
        "tokenizer.json": make_tokenizer(header),
        "tokenizer_config.json": make_tokenizer_config(header),
    }
    with tempfile.TemporaryDirectory() as scratch:
        try:
            dump(Path(scratch), {name: found[name] for name in ("config.json", "generation_config.json")})
            read_served(Path(scratch))
        except ServiceError as error:
            message = error.message.replace(f"{scratch}/", "")
            raise ServiceError(error.code, error.reason, f"{header.path}: {message}") from None
    return found
