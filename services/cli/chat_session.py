"""The exchange of a chat with its server: questions out, answers shown as they come, and what a failure leaves."""

import sys
import time
from collections.abc import Callable

import sluice
import sluice.stream
from rich.console import Console
from sluice.completion import finish_name

from sluice_server.services.cli.answer_display import AnswerDisplay, MarkdownDisplay, PlainDisplay
from sluice_server.services.cli.client import describe
from sluice_server.services.cli.dialogue import Dialogue

TOO_LONG = ("CONTEXT_LENGTH_EXCEEDED", "KV_CAPACITY", "PROMPT_TOO_LARGE")


def display_for(console: Console) -> AnswerDisplay:
    """Returns the display of an answer."""
    return MarkdownDisplay(console) if console.is_terminal else PlainDisplay()


class ChatSession:
    """One conversation with one model."""

    def __init__(
        self,
        client: sluice.Client,
        dialogue: Dialogue,
        address: str,
        model: str,
        show: Callable[[Console], AnswerDisplay] = display_for,
        *,
        adapter: str | None = None,
    ) -> None:
        self._adapter = adapter
        self._console = Console(highlight=False)
        self._beside = Console(highlight=False, stderr=True)
        self._client = client
        self._dialogue = dialogue
        self._address = address
        self._model = model
        self._show = show
        self._has_said_dropped = False
        self._is_typed = True

    def turn(self, line: str) -> None:
        """Handle what the user typed."""
        shown = self._dialogue.typed(line)
        if shown is None:
            self._answer()
        elif shown:
            self._console.print(shown, markup=False)

    def ask(self, question: str) -> bool:
        """Answer a question that is not typed: it has no commands, and Ctrl-C ends more than the answer.

        Returns False if it failed.
        """
        self._dialogue.asked(question)
        self._dialogue.shows_stats = self._is_typed = False
        return self._answer()

    def _answer(self) -> bool:
        """Stream the answer, and keep what was received, however the stream ended. Returns False if it failed."""
        answer = _Answer()
        try:
            self._stream(answer)
            self._say_end(answer)
            return True
        except KeyboardInterrupt:
            self._say("stopped")
            if not self._is_typed:
                raise
        except (sluice.SluiceError, ValueError) as error:
            print(f"error: {self._described(error)}", file=sys.stderr)
        finally:
            self._dialogue.answered("".join(answer.texts))
        return False

    def _stream(self, answer: "_Answer") -> None:
        """Stream the answer; while the conversation is longer than the context, without its oldest turns."""
        num_dropped = 0
        while True:
            try:
                self._stream_once(answer, num_dropped)
                return
            except sluice.SluiceError as error:
                more = self._dialogue.more_dropped(num_dropped)
                if error.reason not in TOO_LONG or answer.texts or more == num_dropped:
                    raise
                num_dropped = more

    def _stream_once(self, answer: "_Answer", num_dropped: int) -> None:
        options: sluice.GenerateOptions = {"model": self._model}
        if self._adapter is not None:
            options["adapter"] = self._adapter
        options |= self._dialogue.sampling()  # type: ignore[typeddict-item] # each value has the type of its field
        stream = self._client.stream(sluice.chat(*self._dialogue.messages(num_dropped)), **options)
        display: AnswerDisplay | None = None
        try:
            for delta in stream:
                if display is None:
                    self._drop(num_dropped)
                    display = self._show(self._console)
                answer.add(delta.text, delta.consumed)
                display.add(delta.text)
            answer.stream = stream
        finally:
            stream.cancel()  # does nothing to a call that has ended
            if display is not None:
                display.end()

    def _drop(self, num_dropped: int) -> None:
        self._dialogue.drop(num_dropped)
        if num_dropped and not self._has_said_dropped:
            self._has_said_dropped = True
            self._say("the conversation is longer than the context: from now on its oldest turns are left out")

    def _say_end(self, answer: "_Answer") -> None:
        stream = answer.stream
        assert stream is not None and stream.progress.finished is not None
        if stream.progress.ends and finish_name(stream.progress.ends[0].finish_reason) == "length":
            num = self._dialogue.sampling()["max_tokens"]
            self._say(f"stopped at {num} tokens; --max-tokens or /set max_tokens allows more")
        if self._dialogue.shows_stats:
            used = stream.progress.finished.usage
            num = used.prompt_tokens + used.completion_tokens
            self._say(f"{answer.speed()}, context {num:,} of {self._dialogue.limits.context_length:,}")

    def _say(self, text: str) -> None:
        """Print a line beside the answer; where the answer is all that is wanted, on standard error."""
        (self._console if self._is_typed else self._beside).print(text, style="dim", markup=False, soft_wrap=True)

    def _described(self, error: sluice.SluiceError | ValueError) -> str:
        """Returns one line."""
        text = describe(error, self._address) if isinstance(error, sluice.SluiceError) else str(error)
        if isinstance(error, sluice.SluiceError) and error.reason in TOO_LONG:
            commands = ", forget the conversation (/clear)" if self._is_typed else ""
            text += f"; shorten the question{commands}, or lower --max-tokens (/set max_tokens)"
        return " ".join(text.split())


class _Answer:
    """An answer so far, and when it came."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.stream: sluice.stream.Stream | None = None
        self._start_s = time.perf_counter()
        self._first_s = self._last_s = 0.0
        self._num_first = self._num_tokens = 0

    def add(self, text: str, num_tokens: int) -> None:
        """Add a delta."""
        self.texts.append(text)
        self._last_s = time.perf_counter()
        self._num_tokens += num_tokens
        if not self._first_s:
            self._first_s, self._num_first = self._last_s, num_tokens

    def speed(self) -> str:
        """Returns its number of tokens, time to first token and speed."""
        first = f"{self._num_tokens} tokens, first after {(self._first_s - self._start_s) * 1e3:.0f} ms"
        num = self._num_tokens - self._num_first
        return f"{first}, {num / (self._last_s - self._first_s):.0f} tokens/s" if num else first
