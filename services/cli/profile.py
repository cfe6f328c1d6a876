"""`sluice profile`: records a profile of one process of a running service, and writes its file."""

import contextlib
import enum
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from sluice_server.services.cli.connection_options import (
    ADDRESS,
    AddressOption,
    ConnectionOptions,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenOption,
)

if TYPE_CHECKING:
    from sluice.v1 import control_pb2

EXIT_FAILED = 1


class Kind(enum.StrEnum):
    """What is recorded; the names of the contract, as an option spells them."""

    TORCH = "torch"
    STACKS = "stacks"
    PYTHON_MEMORY = "python-memory"
    CUDA_MEMORY = "cuda-memory"


SPEEDSCOPE = "open it at https://www.speedscope.app, or with `npx speedscope {path}`"
HOW_TO_OPEN = {
    Kind.TORCH: "open it at https://ui.perfetto.dev, or in chrome://tracing",
    Kind.STACKS: SPEEDSCOPE,
    Kind.PYTHON_MEMORY: SPEEDSCOPE,
    Kind.CUDA_MEMORY: "it is JSON: `gunzip -c {path} | python -m json.tool`; for https://pytorch.org/memory_viz make a "
    "pickle of it: python -c 'import gzip, json, pickle, sys; pickle.dump(json.load(gzip.open(sys.argv[1])), "
    'open("memory.pickle", "wb"))\' {path}',
}
SUFFIXES = {Kind.STACKS: ".speedscope.json.gz", Kind.PYTHON_MEMORY: ".speedscope.json.gz"}


def profile(  # noqa: PLR0913 # a command line lists its options
    kind: Annotated[
        Kind,
        typer.Argument(
            help="torch: operators and kernels of an engine's steps; stacks: what threads do; python-memory: objects "
            "allocated meanwhile; cuda-memory: the device's allocator"
        ),
    ],
    process: Annotated[
        str,
        typer.Option(envvar="SLUICE_PROCESS", help="id of the process, such as gateway-0; default: the first engine"),
    ] = "",
    duration: Annotated[
        float | None, typer.Option(envvar="SLUICE_DURATION", help="seconds to record at most, up to 60; default: 10")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(envvar="SLUICE_STEPS", help="steps of an engine to record at most; torch: 20 by default"),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(envvar="SLUICE_MAX_BYTES", help="bytes of the file at most; default: 64 MiB")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", envvar="SLUICE_OUTPUT", help="the file to write; must not exist yet"),
    ] = None,
    address: AddressOption = ADDRESS,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Record a profile of a process of the server at ADDRESS. Ctrl-C ends it without a file. With an access file it
    needs a key of scope admin."""
    # Imported here, so that the other commands start without it.
    from sluice_server.services.cli.client import client, told

    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    path = output or Path(default_name(kind, process, time.strftime("%Y%m%d-%H%M%S")))
    with told(address), client(address, access) as opened, _new_file(path) as file:
        parts = opened.profile(kind, process=process, duration_s=duration, steps=steps, max_bytes=max_bytes)
        with contextlib.closing(parts):
            found = write(parts, file)
    recorded_s = found.duration.seconds + found.duration.nanos / 1e9
    counted = f" and {found.steps} steps" if found.steps else ""
    typer.echo(f"{path}: {found.bytes} bytes of {recorded_s:.1f} s{counted}")
    typer.echo(HOW_TO_OPEN[kind].format(path=path))


def default_name(kind: Kind, process: str, now: str) -> str:
    """Returns the name of the file where none is given."""
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in process or "engine")
    return f"sluice-{safe}-{kind}-{now}{SUFFIXES.get(kind, '.json.gz')}"


def write(parts: "Iterator[control_pb2.ProfileResponse]", file: BinaryIO) -> "control_pb2.ProfileFinished":
    """Writes the parts of a profile to a file; returns its end. Exits with an error if it is not what was
    sent."""
    digest = hashlib.sha256()
    for part in parts:
        match part.WhichOneof("part"):
            case "started":
                typer.echo(f"recording {part.started.process}", err=True)
            case "data":
                file.write(part.data)
                digest.update(part.data)
            case "finished" if part.finished.sha256 == digest.hexdigest():
                return part.finished
    typer.echo("error: the profile did not arrive as it was sent: record it again", err=True)
    raise typer.Exit(EXIT_FAILED)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name once it is complete; nothing is left of it after an error."""
    from sluice_server.services.config import bad_setting

    part = path.with_name(path.name + ".part")
    if path.exists():
        raise bad_setting("output", f"{path} exists: give another name, or remove it")
    try:
        with part.open("xb") as file:
            yield file
        os.replace(part, path)
    except OSError as error:
        raise bad_setting("output", f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
