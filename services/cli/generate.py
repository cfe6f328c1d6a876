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
    ADDRESS,
    AdapterOption,
    AddressOption,
    ConnectionOptions,
    TimeoutOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenOption,
)
from sluice_server.services.cli.texts import STDIN, decoded

if TYPE_CHECKING:
    from sluice.stream import Stream


@takes_choice
def generate(  # noqa: PLR0913 # a command line lists its options
    prompt: Annotated[str, typer.Argument(help="the prompt; - reads it from standard input")],
    *,
    address: AddressOption = ADDRESS,
    model: Annotated[
        str | None, typer.Option(envvar="SLUICE_GENERATE_MODEL", help="model name; default: the server's")
    ] = None,
    adapter: AdapterOption = None,
    choice: Mapping[str, int | float],
    stop: Annotated[list[str] | None, typer.Option(envvar="SLUICE_STOP", help="stop string; may be repeated")] = None,
    ignore_eos: Annotated[
        bool, typer.Option(envvar="SLUICE_IGNORE_EOS", help="continue after end-of-sequence tokens")
    ] = False,
    chat: Annotated[bool, typer.Option(envvar="SLUICE_CHAT", help="send the prompt as a user's chat message")] = False,
    as_json: Annotated[bool, typer.Option("--json", envvar="SLUICE_JSON", help="print one JSON object")] = False,
    timeout: TimeoutOption = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Stream a completion of PROMPT."""
    # The client is imported here, so that `sluice serve` and `--help` start without it.
    import sluice

    from sluice_server.services.cli.client import client, told

    raw = sys.stdin.buffer.read() if prompt == STDIN else os.fsencode(prompt)
    text = decoded(raw, "PROMPT")
    given = cast("sluice.GenerateOptions", {"ignore_eos": ignore_eos, "stop": stop or [], **choice})
    if model is not None:
        given["model"] = model
    if adapter is not None:
        given["adapter"] = adapter
    asked = sluice.chat(("user", text)) if chat else text
    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, told(address):
        _show(opened.stream(asked, timeout_s=timeout, **given), as_json)


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
