"""`sluice classify`: the classes of texts."""

from collections.abc import Iterator, Sequence
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
from sluice_server.services.cli.texts import FileOption, TruncateOption, parts, texts_of

if TYPE_CHECKING:
    import sluice

COLUMNS = ("#", "score", "class", "text")


def classify(  # noqa: PLR0913 # a command line lists its options
    texts: Annotated[list[str] | None, typer.Argument(metavar="TEXT", help="or - for lines of standard input")] = None,
    *,
    address: AddressOption = ADDRESS,
    file: FileOption = None,
    model: Annotated[str | None, typer.Option(envvar="SLUICE_CLASSIFY_MODEL", help="default: the server's")] = None,
    truncate: TruncateOption = "none",
    as_json: JsonOption = False,
    timeout: TimeoutOption = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Print the class of each TEXT, by a model with a classification head: JSON lines, or a table on a terminal."""
    # Imported here, so that the other commands start without them.
    from sluice_server.services.cli.client import client, told

    options: sluice.ClassifyOptions = {"truncate": truncate}
    if model is not None:
        options["model"] = model
    found = texts_of(texts, file, "TEXT")
    with (
        client(address, ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)) as opened,
        told(address),
    ):
        show(_rows(opened, found, options, timeout), COLUMNS, as_json)


def _rows(
    opened: "sluice.Client", texts: Sequence[str], options: "sluice.ClassifyOptions", timeout_s: float | None
) -> Iterator[Row]:
    for first, part in parts(texts):
        found = opened.classify(part, timeout_s=timeout_s, **options)
        for at, text in enumerate(part):
            yield row(first + at, text, found.labels, found[at])


def row(index: int, text: str, labels: Sequence[str], scores: Sequence[float]) -> Row:
    """Returns the row of a text: its class, and the scores of all, the best first."""
    ranked = sorted(zip(scores, labels, strict=True), key=lambda one: -one[0])
    score, label = ranked[0]
    all_scores = [{"label": name, "score": value} for value, name in ranked]
    return {"index": index, "label": label, "scores": all_scores}, (str(index), f"{score:.4f}", label, text)
