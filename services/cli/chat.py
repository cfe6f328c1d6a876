"""`sluice chat`: a conversation on the terminal, or one question from standard input. Ctrl-C ends an answer, not the
program."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.cli.choice import takes_choice
from sluice_server.services.cli.connection_options import (
    ADDRESS,
    AdapterOption,
    AddressOption,
    ConnectionOptions,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenOption,
)
from sluice_server.services.config import bad_setting

if TYPE_CHECKING:
    import sluice
    from sluice.v1 import control_pb2

    from sluice_server.services.cli.chat_session import ChatSession
    from sluice_server.services.cli.dialogue import Dialogue

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@takes_choice
def chat(  # noqa: PLR0913 # a command line lists its options
    *,
    address: AddressOption = ADDRESS,
    model: Annotated[str | None, typer.Option(envvar="SLUICE_CHAT_MODEL", help="default: the server's")] = None,
    adapter: AdapterOption = None,
    image: Annotated[
        list[str] | None, typer.Option("--image", help="file of a picture for the first question; may be repeated")
    ] = None,
    system: Annotated[str, typer.Option(envvar="SLUICE_SYSTEM", help="system message of the conversation")] = "",
    choice: Mapping[str, int | float],
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Talk to a model; /help lists what else can be typed. Text piped to standard input is one question."""
    # Imported here, so that the other commands start without them.
    import sluice

    from sluice_server.services.cli.chat_session import ChatSession
    from sluice_server.services.cli.client import client, describe

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr] # a terminal may not have all characters
    question = None if sys.stdin.isatty() else _piped()
    with client(address, ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)) as opened:
        try:
            found = _found(opened, model, address)
            dialogue = _dialogue(found, system, choice)
            dialogue.images.extend(map(_read_image, image or []))
            opened.tokenize(sluice.chat(*dialogue.messages(), ("user", "hello")), timeout_s=30.0)
            _say_header(found, dialogue, question is None)
            session = ChatSession(opened, dialogue, address, found.id, adapter=adapter)
            is_answered = _talk(session, dialogue) if question is None else session.ask(question)
        except sluice.SluiceError as error:
            print(f"error: {describe(error, address)}{_hint(error)}", file=sys.stderr)
            raise typer.Exit(EXIT_FAILED) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:
            sys.stdout = None  # the reader is gone: the interpreter must not flush at exit
            raise typer.Exit(EXIT_FAILED) from error
    raise typer.Exit(0 if is_answered else EXIT_FAILED)


def _piped() -> str:
    """Returns standard input as a question. Raises ServiceError if it is empty or not UTF-8."""
    raw = sys.stdin.buffer.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at position {error.start}"
        raise _bad_input(f"is not UTF-8 ({found}); convert it, for example with iconv") from error
    if not text.strip():
        raise _bad_input("is no terminal and has no text; pipe a question, or use a terminal (docker: -it)")
    return text


def _bad_input(message: str) -> ServiceError:
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_PARAMETER", f"standard input {message}")


def _found(client: "sluice.Client", name: str | None, address: str) -> "control_pb2.Model":
    """Returns the model with that id, or the server's first. Raises ServiceError naming --model."""
    models = client.models(timeout_s=30.0)
    for model in models:
        if name in (None, "", model.id):
            return model
    served = ", ".join(model.id for model in models) or "none"
    raise bad_setting("model", f"{name!r} is not served at {address}; it serves {served}")


def _dialogue(model: "control_pb2.Model", system: str, choice: Mapping[str, int | float]) -> "Dialogue":
    """Returns an empty conversation. Raises ServiceError naming the flag of a value out of range."""
    from sluice_server.services.cli.chat_model import defaults_for, limits_of
    from sluice_server.services.cli.dialogue import Dialogue, check_option

    limits = limits_of(model)
    for name, value in choice.items():
        check_option(name, value, limits)
    return Dialogue(
        system, defaults=defaults_for(model), parameters=dict(choice), limits=limits, read_image=_read_image
    )


def _read_image(path: str) -> bytes:
    """Returns the bytes of a file. Raises ServiceError naming it."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise bad_setting("image", f"{path}: {error.strerror}") from error
    if not data:
        raise bad_setting("image", f"{path} is empty")
    return data


def _say_header(model: "control_pb2.Model", dialogue: "Dialogue", is_typed: bool) -> None:
    """Print what answers, and how; beside the answer of a piped question on standard error."""
    from sluice_server.services.cli.chat_model import header

    print(header(model, dialogue.parameters), file=sys.stdout if is_typed else sys.stderr)
    if is_typed:
        print("/help lists the commands; Ctrl-C stops an answer, and leaves when pressed twice at the prompt")


def _talk(session: "ChatSession", dialogue: "Dialogue") -> bool:
    """Read and answer until the user leaves. Returns True."""
    from sluice_server.services.cli.line_reader import LineReader

    reader = LineReader()
    is_interrupted = False
    while not dialogue.has_ended:
        try:
            line = reader.read()
        except EOFError:
            print()
            break
        except KeyboardInterrupt:
            print()
            if is_interrupted:
                break
            print("Ctrl-C again leaves, as /exit and Ctrl-D do")
            is_interrupted = True
            continue
        is_interrupted = False
        session.turn(line)
    return True


def _hint(error: "sluice.SluiceError") -> str:
    if error.reason != "NO_CHAT_TEMPLATE":
        return ""
    return " with `sluice generate`, or serve a model for chats (`sluice serve --model smollm2`)"
