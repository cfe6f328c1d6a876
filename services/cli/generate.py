"""`sluice generate`: sends one prompt over gRPC, and streams the answer to the terminal or prints it as one JSON
object."""

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, cast

import typer

from sluice_server.services.cli.choice import takes_choice
from sluice_server.services.cli.connection_options import (
    ConnectionOptions,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenOption,
)

if TYPE_CHECKING:
    from sluice.stream import Stream

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@takes_choice
def generate(  # noqa: PLR0913 # a command line lists its options
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads it from standard input")],
    *,
    address: Annotated[str, typer.Option(envvar="SLUICE_ADDRESS", help="host:port of the server")] = "127.0.0.1:50051",
    model: Annotated[
        str | None, typer.Option(envvar="SLUICE_GENERATE_MODEL", help="model name; default: the server's")
    ] = None,
    choice: Mapping[str, int | float],
    stop: Annotated[list[str] | None, typer.Option(envvar="SLUICE_STOP", help="stop string; may be repeated")] = None,
    ignore_eos: Annotated[
        bool, typer.Option(envvar="SLUICE_IGNORE_EOS", help="continue after end-of-sequence tokens")
    ] = False,
    chat: Annotated[bool, typer.Option(envvar="SLUICE_CHAT", help="send the prompt as a user's chat message")] = False,
    as_json: Annotated[bool, typer.Option("--json", envvar="SLUICE_JSON", help="print one JSON object")] = False,
    timeout: Annotated[float | None, typer.Option(envvar="SLUICE_TIMEOUT", help="deadline in seconds")] = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Stream a completion of PROMPT."""
    # The client is imported here, so that `sluice serve` and `--help` start without it.
    import sluice

    from sluice_server.services.cli.client import client, describe

    text = _text(prompt)
    given = cast("sluice.GenerateOptions", {"ignore_eos": ignore_eos, "stop": stop or [], **choice})
    if model is not None:
        given["model"] = model
    asked = sluice.chat(("user", text)) if chat else text
    with client(address, ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)) as opened:
        try:
            _show(opened.stream(asked, timeout_s=timeout, **given), as_json)
        except ValueError as error:
            raise typer.BadParameter(f"an option has a value that its field cannot hold: {error}") from error
        except sluice.SluiceError as error:
            print(f"error: {describe(error, address)}", file=sys.stderr)
            raise typer.Exit(EXIT_FAILED) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:
            sys.stdout = None  # the reader is gone: the interpreter must not flush at exit
            raise typer.Exit(EXIT_FAILED) from error


def _text(prompt: str) -> str:
    """Returns the prompt's text. Raises BadParameter for bytes that are not UTF-8, from the argument or standard
    input."""
    raw = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at position {error.start}"
        raise typer.BadParameter(f"PROMPT: is not UTF-8 ({found}); convert it, for example with iconv") from error


def _show(stream: "Stream", as_json: bool) -> None:
    """Stream to stdout; with `as_json` collect and print one object."""
    from sluice.completion import finish_name

    from sluice_server.services.cli.client import timings_of, usage_of

    text: list[str] = []
    ids: list[int] = []
    for delta in stream:
        text.append(delta.text)
        ids.extend(token.id for token in delta.tokens)
        if not as_json:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    if not as_json:
        sys.stdout.write("\n")
        return
    finished = stream.progress.finished
    assert finished is not None
    result = {
        "text": "".join(text),
        "token_ids": ids,
        "finish_reason": finish_name(stream.progress.ends[0].finish_reason),
        "usage": usage_of(finished.usage),
        "timings": timings_of(finished.timings),
    }
    print(json.dumps(result, ensure_ascii=False))
