"""`sluice rerank`: documents in the order in which they answer a query."""

import os
from typing import TYPE_CHECKING, Annotated

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
    decoded,
    texts_of,
)

if TYPE_CHECKING:
    import sluice

COLUMNS = ("#", "score", "document")


def rerank(  # noqa: PLR0913 # a command line lists its options
    query: Annotated[str, typer.Argument(help="what the documents are to answer")],
    documents: Annotated[
        list[str] | None, typer.Argument(metavar="DOCUMENT", help="or - for lines of standard input")
    ] = None,
    *,
    address: AddressOption = ADDRESS,
    file: FileOption = None,
    model: Annotated[str | None, typer.Option(envvar="SLUICE_RERANK_MODEL", help="default: the server's")] = None,
    top_n: Annotated[int | None, typer.Option(envvar="SLUICE_TOP_N", min=1, help="print so many; default: all")] = None,
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
    """Print the DOCUMENTs that answer QUERY best, the best first: JSON lines, or a table on a terminal."""
    # Imported here, so that the other commands start without them.
    from sluice_server.services.cli.client import client, told

    options: sluice.RerankOptions = {"truncate": truncate}
    if model is not None:
        options["model"] = model
    if top_n is not None:
        options["top_n"] = top_n
    if instruction is not None:
        options["instruction"] = instruction
    asked, texts = decoded(os.fsencode(query), "QUERY"), texts_of(documents, file, "DOCUMENT")
    with (
        client(address, ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)) as opened,
        told(address),
    ):
        found = opened.rerank(asked, texts, timeout_s=timeout, **options)
        show((row(one.index, texts[one.index], one.score) for one in found), COLUMNS, as_json)


def row(index: int, document: str, score: float) -> Row:
    """Returns the row of a document."""
    return {"index": index, "score": score, "document": document}, (str(index), f"{score:.4f}", document)
