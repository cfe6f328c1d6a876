"""The commands in real processes: environment, standard input, Ctrl-C, a load that ends well, and wrong flags."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.service import serve, wait_until

SLUICE = (sys.executable, "-m", "sluice_server")


def sluice(
    *arguments: str, stdin: str | None = None, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the command line to its end."""
    env = {**os.environ, **(environment or {})}
    return subprocess.run(
        [*SLUICE, *arguments], capture_output=True, text=True, input=stdin, timeout=60, check=False, env=env
    )


def test_commands_against_a_service(tmp_path: Path) -> None:
    with serve() as service:
        env = {"SLUICE_ADDRESS": service.address, "SLUICE_MAX_TOKENS": "6", "SLUICE_TEMPERATURE": "0"}
        plain = sluice("generate", "def mean(values):", environment=env)
        assert plain.returncode == 0 and plain.stderr == ""
        watched = sluice("top", "--once", environment=env)
        assert watched.returncode == 0 and "engine-0" in watched.stdout
        piped = sluice("generate", "-", "--json", stdin="def mean(values):", environment=env)
        shown = json.loads(piped.stdout)
        assert shown["text"] + "\n" == plain.stdout
        assert shown["usage"]["completion_tokens"] == len(shown["token_ids"]) == 6

        report = tmp_path / "bench.json"
        load = ("--concurrency", "3", "--requests", "7", "--input-len", "5", "--output-len", "9", "--warmup", "0")
        result = sluice("bench", *load, "--json", str(report), environment=env)
        assert result.returncode == 0, result.stderr
        figures = json.loads(report.read_text())
        assert figures["output_tokens"] == 63 and not figures["errors"]
        assert set(figures["ttft_ms"]) == {"mean", "p50", "p90", "p99", "max"}
        assert figures["settings"]["concurrency"] == 3

        picture = tmp_path / "load.svg"
        swept = ("--sweep", "1,2", "--requests", "3", "--plot", str(picture), "--json", str(report), *load[4:])
        assert sluice("bench", *swept, environment=env).returncode == 0
        levels = json.loads(report.read_text())["levels"]
        assert [(one["load"], one["output_tokens"]) for one in levels] == [(1, 27), (2, 27)]
        assert picture.read_text().count("<polyline") == 7

        failed = sluice("bench", "--requests", "2", "--warmup", "0", "--input-len", "5000", environment=env)
        assert failed.returncode == 1 and "2 x INVALID_ARGUMENT, first: prompt" in failed.stdout

        writer = subprocess.Popen(
            [*SLUICE, "generate", "x = ", "--max-tokens", "1900"],
            env={**os.environ, "SLUICE_ADDRESS": service.address, "SLUICE_IGNORE_EOS": "1"},
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None and writer.stdout.read(1)
        writer.send_signal(signal.SIGINT)
        assert writer.wait(10) == 130
        writer.stdout.close()
        wait_until(lambda: service.num_running() == 0, 10, "the engine works on for a client that went away")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate",), "Missing argument"),
        (("generate", "x", "--max-tokens", "many"), "--max-tokens"),
        (("generate", "x", "--max-tokens", "-1"), "has a value that its field cannot hold"),
        (("generate", "x", "--no-such-flag"), "No such option"),
        (("generate", "\udcff\udcfe"), "is not UTF-8 (byte 0xff at"),
        (("bench", "--concurrency", "0"), "--concurrency"),
        (("bench", "--json", "/nowhere/at/all.json"), "there is no directory"),
        (("bench", "--sweep", "1,many"), "is no list of numbers"),
        (("bench", "--plot", "load.svg"), "give both"),
        (("keys", "somewhere", "../up"), "is not a process id"),
        (("keys", "/proc/nowhere", "engine-0"), "cannot write keys"),
        (("unheard-of",), "No such command"),
    ],
)
def test_wrong_usage_ends_with_two_and_says_why(arguments: tuple[str, ...], said: str) -> None:
    result = sluice(*arguments)
    assert result.returncode == 2
    assert said in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["serve", "generate", "bench", "chat", "demo", "keys"])
def test_every_command_has_help(command: str) -> None:
    result = sluice(command, "--help")
    assert result.returncode == 0 and "Usage" in result.stdout
