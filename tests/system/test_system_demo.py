"""`sluice demo`, and what `sluice serve` says of the embedded model."""

import subprocess
import sys

import pytest

from tests.system.service import serve

SLUICE = (sys.executable, "-m", "sluice_server")


def demo(*options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*SLUICE, "demo", *options], capture_output=True, text=True, timeout=100, check=False, stdin=subprocess.DEVNULL
    )


def test_the_embedded_model_completes_and_its_figures_are_shown() -> None:
    shown = demo("--model", "demo", "--max-tokens", "5")
    assert shown.returncode == 0 and shown.stderr == ""
    for part in ("def fibonacci", "TTFT", "5 tokens", "MiB (detokenizer-0 ", "decode", "serve --model demo"):
        assert part in shown.stdout
    assert "not installed" not in shown.stdout


@pytest.mark.long
def test_a_prompt_of_ones_own() -> None:
    assert "\nimport os\n" in demo("import os", "--model", "demo", "--max-tokens", "2").stdout


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (("--model", "nowhere"), 1, "--model nowhere: no such directory"),
        (("--model", "demo", "--max-tokens", "-1"), 2, "--max-tokens: -1 is not in [0, "),
        (("--model", "demo", "--temperature", "900"), 2, "--temperature: 900.0 is not in [0.0, 100.0]"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[str, ...], status: int, said: str) -> None:
    failed = demo(*options)
    assert failed.returncode == status
    assert failed.stderr.startswith("error: ") and said in failed.stderr and len(failed.stderr.splitlines()) == 1


def test_a_server_says_that_it_serves_the_embedded_model() -> None:
    with serve("--model", "demo") as service:
        assert service.process.stdout is not None
        assert "--model takes smollm2" in service.process.stdout.readline()
