"""`sluice chat` in a terminal: commands, answers, and a Ctrl-C that ends an answer and not the program."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe
from tests.system.service import serve, wait_until

pytestmark = pytest.mark.long


def test_a_conversation(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(vocab=400, context=2048))
    byte_level_bpe(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with serve("--model", str(tmp_path), "--dtype", "float32") as service:
        command = [sys.executable, "-m", "sluice_server", "chat", "--address", service.address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        chat = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload] # mixed
        assert chat.stdin is not None

        def type_in(line: str) -> None:
            chat.stdin.write(line + "\n")
            chat.stdin.flush()

        try:
            type_in("/set max_tokens 2000")
            type_in("hello")
            wait_until(lambda: service.num_running() == 1, 30, "the answer does not begin")
            chat.send_signal(signal.SIGINT)
            wait_until(lambda: service.num_running() == 0, 30, "the engine works on for an answer that was cancelled")
            type_in("/set max_tokens 3")
            type_in("again")
            type_in("/nonsense")
            said, errors = chat.communicate("/quit\n", timeout=60)
        finally:
            chat.kill()
            chat.wait()
        assert chat.returncode == 0 and errors == ""
        assert "cancelled" in said and "/nonsense is no command" in said and "tokens/s" in said
