"""`sluice import-gguf`: writes the Hugging Face folder of a GGUF file."""

from pathlib import Path
from typing import Annotated

import typer

from sluice_server.services.config import bad_setting

DTYPES = ("float32", "bfloat16")


def import_gguf(
    file: Annotated[Path, typer.Argument(help="the GGUF file; of shards the first one")],
    directory: Annotated[Path, typer.Argument(help="where to write; made if it is not there, else empty")],
    dtype: Annotated[str, typer.Option(help="of the weights: float32 loses nothing, bfloat16 takes half")] = "float32",
) -> None:
    """Write a Hugging Face folder of a GGUF file: safetensors, config.json, tokenizer.json and the chat template.

    To serve a GGUF file this is not needed: --model takes it as it is.
    """
    if dtype not in DTYPES:
        raise bad_setting("dtype", f"{dtype!r} is not one of {', '.join(DTYPES)}")
    # Imported here because other commands need no torch.
    import torch

    from sluice_server.services.checkpoint.gguf import importing

    try:
        if directory.exists() and any(directory.iterdir()):
            raise bad_setting("directory", f"{directory} is not empty")
        num = importing.import_gguf(file, directory, getattr(torch, dtype))
    except OSError as error:
        raise bad_setting("directory", f"cannot write to {directory}: {error.strerror}") from error
    typer.echo(f"{directory}: {num} parameters in {dtype}")
