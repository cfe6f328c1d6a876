"""`sluice chat` as people use it: on a terminal, where a Ctrl-C ends an answer and not the program, and in a pipe."""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe
from tests.system.service import Service, serve, wait_until

CHAT = (sys.executable, "-m", "sluice_server", "chat")
CTRL_C = b"\x03"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Serves a model with a chat template, as "small"."""
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, Shape(vocab=400, context=2048))
    byte_level_bpe(directory)
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with serve("--model", str(directory), "--served-model-name", "small", "--dtype", "float32") as service:
        yield service


class Terminal:
    """A terminal with `sluice chat` in it."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._shown = b""

    def type_in(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def interrupt(self) -> None:
        """Types Ctrl-C when the program waits: between prompt and waiting, readline notes it and goes on waiting."""
        wait_until(lambda: psutil.Process(self.process.pid).status() == "sleeping", 30, "the program waits for no key")
        self.type_in(CTRL_C)

    def seen(self, *marks: bytes) -> str:
        """What is shown until the marks have come, one after the other."""
        at = 0
        for mark in marks:
            while mark not in self._shown[at:]:
                self._shown += os.read(self._descriptor, 4096)
            at = self._shown.index(mark, at) + len(mark)
        shown, self._shown = self._shown[:at], self._shown[at:]
        return shown.decode(errors="replace")


@contextlib.contextmanager
def terminal(*options: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
    # A session of its own, whose terminal this is: else Ctrl-C is a byte like any other.
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES_TERMINAL, *CHAT, *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


TAKES_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def piped(service: Service, text: str, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [*CHAT, "--address", service.address, *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_a_conversation(service: Service) -> None:
    # Without min_tokens the answer may end by itself before it is stopped.
    with terminal("--address", service.address, "--max-tokens", "2000", "--min-tokens", "2000") as chat:
        assert "answers of at most 2,000; min_tokens 2000, temperature 0.7, top_p 0.9 (as the model" in chat.seen(b"> ")
        chat.type_in(b"hello\n")
        wait_until(lambda: service.num_running() == 1, 30, "the answer does not begin")
        chat.interrupt()
        chat.seen(b"stopped", b"> ")
        wait_until(lambda: service.num_running() == 0, 30, "the engine works on for an answer that was stopped")
        chat.type_in(b"/set min_tokens\n")
        chat.seen(b"min_tokens: ", b"> ")
        chat.type_in(b"/set max_tokens 3\n")
        chat.seen(b"max_tokens: 3", b"> ")
        chat.type_in(b"again\n")
        assert "stopped at 3 tokens; --max-tokens" in chat.seen(b"of 2,048", b"> ")
        chat.type_in(b"half a line")
        chat.seen(b"half a line")
        chat.interrupt()
        chat.seen(b"Ctrl-C again leaves", b"> ")
        chat.type_in(b"/nonsense\n")
        assert "/nonsense is no command" in chat.seen(b"help lists", b"> ")
        chat.interrupt()
        chat.seen(b"Ctrl-C again leaves", b"> ")
        chat.interrupt()
        assert chat.process.wait(30) == 0


def test_a_conversation_outgrows_the_context_and_goes_on(service: Service) -> None:
    with terminal("--address", service.address, "--max-tokens", "5") as chat:
        said = chat.seen(b"> ")
        for _ in range(8):
            chat.type_in(b"word " * 150 + b"\n")
            said += chat.seen(b"of 2,048", b"> ")
        assert said.count("oldest turns are left out") == 1 and "error" not in said
        chat.type_in(b"/exit\n")
        assert chat.process.wait(30) == 0


def test_a_piped_question(service: Service) -> None:
    answered = piped(service, "/etc/motd\nwhat is this?", "--max-tokens", "3", "--temperature", "0")
    assert answered.returncode == 0 and answered.stdout.strip()
    assert answered.stderr.splitlines() == [
        "small: context 2,048 tokens, answers of at most 3; temperature 0",
        "stopped at 3 tokens; --max-tokens or /set max_tokens allows more",
    ]


@pytest.mark.parametrize(
    ("text", "options", "status", "said"),
    [
        ("", (), 2, "standard input is no terminal and has no text"),
        ("hi", ("--model", "nope"), 2, "--model: 'nope' is not served at "),
        ("hi", ("--temperature", "900"), 2, "--temperature: 900.0 is not in [0.0, 100.0]"),
        ("hi", ("--max-tokens", "4000"), 2, "--max-tokens: 4000 is not in [0, 2048]"),
        ("hi", ("--address", "127.0.0.1:1"), 1, "no server answers at 127.0.0.1:1"),
        ("hello " * 2_000_000, (), 1, "bytes"),
        ("hello " * 2000, (), 1, "shorten the question, or lower --max-tokens"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    service: Service, text: str, options: tuple[str, ...], status: int, said: str
) -> None:
    failed = piped(service, text, *options)
    errors = [line for line in failed.stderr.splitlines() if not line.startswith("small: ")]
    assert failed.returncode == status and failed.stdout == ""
    assert len(errors) == 1 and errors[0].startswith("error: ") and said in errors[0]


def test_a_model_without_a_template_for_chats_is_refused_before_anything_is_typed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(vocab=400, context=2048))
    byte_level_bpe(tmp_path)
    with serve("--model", str(tmp_path)) as service:
        failed = piped(service, "hi")
        assert failed.returncode == 1 and failed.stdout == ""
        assert "no chat template" in failed.stderr and "sluice serve --model smollm2" in failed.stderr
        assert len(failed.stderr.splitlines()) == 1
