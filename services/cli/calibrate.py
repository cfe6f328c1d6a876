"""`sluice calibrate`: writes the token ids of a text, by which int4 rounds weights better than by random ones."""

from pathlib import Path
from typing import Annotated

import typer

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.calibration import MAX_IDS, MIN_IDS, write_calibration


def calibrate(
    model: Annotated[str, typer.Argument(help="as --model of serve: a directory, a GGUF file, a hub id, smollm2")],
    text: Annotated[Path, typer.Argument(help="a text file, such as what the model is going to read and write")],
    file: Annotated[Path, typer.Argument(help="where to write")],
    tokens: Annotated[int, typer.Option(min=MIN_IDS, max=MAX_IDS, help="of the text, from its beginning")] = 512,
    revision: Annotated[str, typer.Option(help="of a hub id")] = "",
) -> None:
    """Write the token ids of a text. With --quantization int4, serve --calibration FILE observes them to round weights.

    Without a calibration random ids are observed, which is nearly as good.
    """
    # Imported here because other commands need neither.
    from sluice_server.engine.models.config import read_config
    from sluice_server.services.checkpoint.model_source import directory_of, resolve_model
    from sluice_server.services.tokenizer.encoding import load_tokenizer

    directory = directory_of(resolve_model(model, revision).directory)
    vocab_size = read_config(directory).vocab_size
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    try:
        written = text.read_bytes()[: 64 * tokens].decode(errors="replace")
    except OSError as error:
        raise _unusable(f"TEXT: cannot read {text}: {error.strerror}") from error
    ids = tokenizer.encode(written).ids[:tokens]
    if len(ids) < MIN_IDS:
        raise _unusable(f"TEXT: {text} has {len(ids)} tokens; at least {MIN_IDS} are needed")
    try:
        write_calibration(file, vocab_size, ids)
    except OSError as error:
        raise _unusable(f"FILE: cannot write {file}: {error.strerror}") from error
    typer.echo(f"{file}: {len(ids)} ids; sluice serve --quantization int4 --calibration {file}")


def _unusable(message: str) -> ServiceError:
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", message)
