"""The README: its commands run as written, and it stays short."""

import re
import subprocess
import sys
from pathlib import Path

from sluice_server.services.checkpoint.packaged import SMOLLM2
from sluice_server.services.edge.wire import ChatRequest, decode
from tests.system.service import serve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAX_WORDS = 700  # outside its table


def test_it_is_short() -> None:
    outside = [line for line in README.splitlines() if not line.startswith("|")]
    assert len(" ".join(outside).split()) <= MAX_WORDS


def run(*command: str) -> str:
    """The command's standard output."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with serve("--model", "demo") as service:
        assert "length 40" in run(sys.executable, "-c", example.replace("127.0.0.1:50051", service.address))


def test_its_commands_name_what_there_is() -> None:
    (model,) = re.findall(r"^\.venv/bin/sluice serve (\S+) --http \S+ ", README, re.MULTILINE)
    assert model == SMOLLM2
    assert "demo: $(VENV)/.run $(VENV)/.smollm2 ##" in (ROOT / "Makefile").read_text()


def test_the_body_that_it_sends_to_the_edge_is_a_request() -> None:
    (body,) = re.findall(r"-d '(.*?)'", README)
    assert decode(body.encode(), ChatRequest).values()["model"] == SMOLLM2
