"""`sluice embed`: the vectors of texts."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sluice_server.services.cli.connection_options import (
    ADDRESS,
    AddressOption,
    ConnectionOptions,
    TimeoutOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenOption,
)
from sluice_server.services.cli.rows import JsonOption, Row, show
from sluice_server.services.cli.texts import (
    FileOption,
    InstructionOption,
    TruncateOption,
    parts,
    texts_of,
)

if TYPE_CHECKING:
    import sluice

COLUMNS = ("#", "tokens", "size", "length", "vector", "text")
NUM_SHOWN = 3  # components in the table


def embed(  # noqa: PLR0913 # a command line lists its options
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="or - for lines of standard input")] = None,
    *,
    address: AddressOption = ADDRESS,
    file: FileOption = None,
    model: Annotated[str | None, typer.Option(envvar="SLUICE_EMBED_MODEL", help="default: the server's")] = None,
    pooling: Annotated[
        Literal["first", "last", "mean"] | None, typer.Option(envvar="SLUICE_POOLING", help="default: the model's")
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(envvar="SLUICE_NORMALIZE", help="scale to length 1; default: as the model says")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(envvar="SLUICE_DIMENSIONS", min=1, help="keep so many leading components")
    ] = None,
    instruction: InstructionOption = None,
    truncate: TruncateOption = "none",
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Print a vector of each TEXT: JSON lines, or a table on a terminal."""
    # Imported here, so that the other commands start without them.
    from sluice_server.services.cli.client import client, told

    options: sluice.EmbedOptions = {"truncate": truncate}
    if model is not None:
        options["model"] = model
    if pooling is not None:
        options["pooling"] = pooling
    if normalize is not None:
        options["normalize"] = normalize
    if dimensions is not None:
        options["dimensions"] = dimensions
    if instruction is not None:
        options["instruction"] = instruction
    found = texts_of(texts, file, "TEXT")
    with (
        client(address, ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)) as opened,
        told(address),
    ):
        show(_rows(opened, found, options, timeout), COLUMNS, as_json)


def _rows(
    opened: "sluice.Client", texts: Sequence[str], options: "sluice.EmbedOptions", timeout_s: float | None
) -> Iterator[Row]:
    for first, part in parts(texts):
        found = opened.embed(part, timeout_s=timeout_s, **options)
        for at, one in enumerate(found.response.embeddings):
            yield row(first + at, part[at], one.prompt_tokens, list(one.values))


def row(index: int, text: str, num_tokens: int, vector: list[float]) -> Row:
    """Returns the row of a vector."""
    length = math.sqrt(math.fsum(one * one for one in vector))
    beginning = " ".join(f"{one:+.3f}" for one in vector[:NUM_SHOWN])
    cells = (str(index), str(num_tokens), str(len(vector)), f"{length:.3f}", beginning, text)
    return {"index": index, "tokens": num_tokens, "embedding": vector}, cells
