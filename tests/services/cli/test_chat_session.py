"""A chat session on a console, with a stand-in client."""

import io
from typing import cast

import sluice
import sluice.stream
from rich.console import Console

from sluice_server.services.cli.chat import ChatSession
from sluice_server.services.cli.dialogue import Dialogue


class Interrupting:
    """A client whose call is interrupted before it returns a stream."""

    def stream(self, *_: object, **options: object) -> "sluice.stream.Stream":
        raise KeyboardInterrupt


def test_an_interrupt_before_there_is_a_stream_cancels_the_answer_and_no_more() -> None:
    said = io.StringIO()
    console = Console(file=said)
    console.input = lambda *_, **__: "hello"  # type: ignore[method-assign] # what a person types
    session = ChatSession(console, cast(sluice.Client, Interrupting()), Dialogue(), "localhost:1", None)
    session.turn()
    assert "cancelled" in said.getvalue()
