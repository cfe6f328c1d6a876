"""`sluice chat`: a conversation on the terminal. Answers stream as Markdown; Ctrl-C ends an answer, not the program."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from sluice_server.services.cli.connection_options import (
    ConnectionOptions,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenOption,
)
from sluice_server.services.cli.dialogue import Dialogue

if TYPE_CHECKING:
    import sluice
    from rich.console import Console

FRAMES_PER_SECOND = 12


def chat(  # noqa: PLR0913 # a command line lists its options
    address: Annotated[str, typer.Option(envvar="SLUICE_ADDRESS", help="host:port of the server")] = "127.0.0.1:50051",
    model: Annotated[str | None, typer.Option(envvar="SLUICE_CHAT_MODEL", help="default: the server's")] = None,
    system: Annotated[str, typer.Option(envvar="SLUICE_SYSTEM", help="system message of the conversation")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(envvar="SLUICE_MAX_TOKENS", help="the most tokens of an answer")
    ] = None,
    temperature: Annotated[float | None, typer.Option(envvar="SLUICE_TEMPERATURE", help="0 is greedy")] = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Talk to a model; /help lists what else can be typed."""
    # Imported here, so that the other commands start without them.
    from rich.console import Console

    from sluice_server.services.cli.client import client

    dialogue = Dialogue(system)
    for name, value in (("max_tokens", max_tokens), ("temperature", temperature)):
        if value is not None:
            dialogue.parameters[name] = value
    console = Console()
    with client(address, ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)) as opened:
        talk = ChatSession(console, opened, dialogue, address, model)
        console.print("[dim]/help lists the commands[/dim]")
        while not dialogue.has_ended:
            talk.turn()


class ChatSession:
    """One conversation on one console."""

    def __init__(
        self, console: "Console", client: "sluice.Client", dialogue: Dialogue, address: str, model: str | None
    ) -> None:
        self._console = console
        self._client = client
        self._dialogue = dialogue
        self._address = address
        self._model = model

    def turn(self) -> None:
        """Read a line and handle it. Ctrl-C while reading discards the line."""
        try:
            line = self._console.input("[bold cyan]> [/bold cyan]")
        except EOFError:
            self._dialogue.has_ended = True
            return
        except KeyboardInterrupt:
            self._console.print()
            return
        shown = self._dialogue.typed(line)
        if shown is None:
            self._dialogue.answered(self._answer())
        elif shown:
            self._console.print(shown, markup=False, highlight=False)

    def _answer(self) -> str:
        """Stream the answer. Returns the received text, however the stream ended."""
        import sluice

        from sluice_server.services.cli.client import describe

        options: sluice.GenerateOptions = {"model": self._model} if self._model else {}
        options |= self._dialogue.parameters  # type: ignore[typeddict-item] # each value has the type of its field
        texts: list[str] = []
        stream: sluice.stream.Stream | None = None
        try:
            stream = self._client.stream(sluice.chat(*self._dialogue.messages()), **options)
            self._show(stream, texts)
        except KeyboardInterrupt:
            if stream is not None:  # else the interrupt came before the call was made
                stream.cancel()
            self._console.print("[dim]cancelled[/dim]")
        except (sluice.SluiceError, ValueError) as error:
            said = describe(error, self._address) if isinstance(error, sluice.SluiceError) else str(error)
            print(f"error: {said}", file=sys.stderr)
        return "".join(texts)

    def _show(self, stream: "sluice.stream.Stream", texts: list[str]) -> None:
        from rich.live import Live
        from rich.markdown import Markdown

        start, first_s, num_tokens = time.perf_counter(), 0.0, 0
        live = Live(console=self._console, refresh_per_second=FRAMES_PER_SECOND, vertical_overflow="visible")
        with live:
            for delta in stream:
                num_tokens += delta.consumed
                first_s = first_s or time.perf_counter() - start
                texts.append(delta.text)
                live.update(Markdown("".join(texts)))
        took_s = time.perf_counter() - start
        if self._dialogue.shows_stats and num_tokens > 1:
            rate = (num_tokens - 1) / (took_s - first_s)
            first = f"first token after {first_s * 1e3:.0f} ms"
            self._console.print(f"{num_tokens} tokens, {first}, {rate:.0f} tokens/s", style="dim", highlight=False)
