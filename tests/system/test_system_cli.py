"""The commands in real processes: environment, standard input, Ctrl-C, a load that ends well, and wrong flags."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice_server.services.cli.texts import MAX_TEXTS
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


def check_batch(folder: Path, env: dict[str, str], expected: str) -> None:
    """A batch is answered as single requests are, and what was answered is not asked again."""
    batch, answers = folder / "in.jsonl", folder / "out.jsonl"
    body = {"model": "demo", "prompt": "def mean(values):", "max_tokens": 6, "temperature": 0}
    request = {"method": "POST", "url": "/v1/completions"}
    batch.write_text("".join(json.dumps({"custom_id": str(at), **request, "body": body}) + "\n" for at in range(5)))
    ran = sluice("run-batch", str(batch), str(answers), "--concurrency", "2", environment=env)
    assert (ran.returncode, ran.stdout.split(": ")[1]) == (0, "5 answered, 0 failed, 0 stood there before\n")
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    found = [one["response"]["body"]["choices"][0]["text"] for one in lines]
    assert [text + "\n" for text in found] == [expected] * 5
    again = sluice("run-batch", str(batch), str(answers), environment=env)
    assert again.stdout.split(": ")[1] == "0 answered, 0 failed, 5 stood there before\n"


def check_vectors(folder: Path, env: dict[str, str]) -> None:
    """Vectors are the same from a file, standard input and arguments; what the model has no head for is refused."""
    texts = [f"text {at}" for at in range(MAX_TEXTS + 1)]
    (folder / "texts").write_text("\n".join(texts) + "\n")
    options = ("--dimensions", "8", "--json")
    ran = sluice("embed", "--file", str(folder / "texts"), *options, environment=env)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [one["index"] for one in rows] == list(range(len(texts)))
    for asked in (("embed", "-", *options), ("embed", texts[0], texts[-1], *options)):
        few = sluice(*asked, stdin=f"{texts[0]}\n{texts[-1]}", environment=env)
        found = [json.loads(line)["embedding"] for line in few.stdout.splitlines()]
        assert len(found) == 2
        for one, want in zip(found, (rows[0], rows[-1]), strict=True):
            assert len(one) == 8 and one == pytest.approx(want["embedding"], abs=1e-4)
    refused = sluice("classify", "x", environment=env)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("error: UNIMPLEMENTED") and refused.stderr.count("\n") == 1


def check_profiles(folder: Path, env: dict[str, str]) -> None:
    """Profiles under load are files that say how to open them; wrong ones leave nothing, and no request fails."""
    load = (
        "bench",
        "--concurrency",
        "2",
        "--requests",
        "40",
        "--input-len",
        "5",
        "--output-len",
        "90",
        "--warmup",
        "0",
    )
    busy = subprocess.Popen([*SLUICE, *load], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    trace, stacks = folder / "torch.json.gz", folder / "stacks.json.gz"
    ran = sluice("profile", "torch", "--steps", "5", "-o", str(trace), environment=env)
    assert ran.returncode == 0 and "perfetto" in ran.stdout and str(trace) in ran.stdout, ran.stderr
    text = gzip.decompress(trace.read_bytes()).decode()
    assert "aten::" in text and "kernels/cpu" in text  # operators, and the callers of our kernels
    limits = ("--process", "gateway-0", "--duration", "0.3")
    ran = sluice("profile", "stacks", *limits, "-o", str(stacks), environment=env)
    assert ran.returncode == 0 and "speedscope" in ran.stdout, ran.stderr
    assert json.loads(gzip.decompress(stacks.read_bytes()))["profiles"]
    for wrong, says in (
        (("cuda-memory", "-o", str(folder / "new")), "no CUDA memory"),
        (("stacks", "-o", str(trace)), "exists"),
    ):
        refused = sluice("profile", *wrong, environment=env)
        assert refused.returncode in (1, 2) and says in refused.stderr and refused.stderr.count("\n") <= 2, (
            refused.stderr
        )
    assert not list(folder.glob("new*")) and not list(folder.glob("*.part"))
    said, _ = busy.communicate(timeout=60)
    assert busy.returncode == 0 and said.split()[-2:] == ["0", "failed"]


def check_top_in_a_pipe(env: dict[str, str]) -> None:
    """One view comes below the other, as each is made."""
    top = subprocess.Popen([*SLUICE, "top"], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    assert top.stdout is not None
    views = (line for line in top.stdout if line.startswith("sluice "))
    assert next(views) and next(views)
    top.send_signal(signal.SIGINT)
    assert top.wait(60) == 0
    top.stdout.close()


def test_commands_against_a_service(tmp_path: Path) -> None:
    with serve() as service:
        env = {"SLUICE_ADDRESS": service.address, "SLUICE_MAX_TOKENS": "6", "SLUICE_TEMPERATURE": "0"}
        plain = sluice("generate", "def mean(values):", environment=env)
        assert plain.returncode == 0 and plain.stderr == ""
        watched = sluice("top", "--once", environment=env)
        assert watched.returncode == 0 and "engine-0" in watched.stdout
        check_top_in_a_pipe(env)
        check_profiles(tmp_path, {"SLUICE_ADDRESS": service.address})
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

        check_batch(tmp_path, env, plain.stdout)
        check_vectors(tmp_path, env)

        failed = sluice("bench", "--requests", "2", "--warmup", "0", "--input-len", "5000", environment=env)
        assert failed.returncode == 1 and "2 x INVALID_ARGUMENT, first: prompt" in failed.stdout

        writer = subprocess.Popen(
            [*SLUICE, "generate", "x = ", "--max-tokens", "1900"],
            env={**os.environ, "SLUICE_ADDRESS": service.address, "SLUICE_IGNORE_EOS": "1"},
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None and writer.stdout.read(1)
        writer.send_signal(signal.SIGINT)
        assert writer.wait(60) == 130
        writer.stdout.close()
        wait_until(lambda: service.num_running() == 0, 60, "the engine works on for a client that went away")


def test_a_service_with_keys_answers_those_who_have_one() -> None:
    with serve(environment={"SLUICE_API_KEY": "one two"}) as service:
        ask = ("generate", "x = ", "--max-tokens", "2", "--address", service.address)
        without = sluice(*ask)
        assert without.returncode == 1 and "--api-key or SLUICE_API_KEY gives the key" in without.stderr
        assert "Traceback" not in without.stderr
        assert sluice(*ask, "--api-key", "wrong").returncode == 1
        assert sluice(*ask, "--api-key", "one").returncode == 0
        assert sluice(*ask, environment={"SLUICE_API_KEY": "two one"}).returncode == 0
        assert sluice("top", "--once", "--address", service.address, "--token", "two").returncode == 0


def test_a_mistake_that_several_processes_find_is_told_once() -> None:
    elsewhere = ("--metrics-host", "192.0.2.1", "--metrics-port", "9000")  # an address that no host has
    result = sluice("serve", "demo", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--threads", "1", *elsewhere)
    assert result.returncode == 1 and result.stderr.count("cannot listen on 192.0.2.1") == 1, result.stderr


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from sluice_server.__main__ import main
main()
"""


def test_ctrl_c_during_the_imports_leaves_no_traceback() -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGINT, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate",), "Missing argument"),
        (("generate", "x", "--max-tokens", "many"), "--max-tokens"),
        (("generate", "x", "--max-tokens", "-1"), "max_tokens: -1 does not fit"),
        (("generate", "x", "--no-such-flag"), "No such option"),
        (("generate", "\udcff\udcfe"), "is not UTF-8 (byte 0xff at"),
        (("bench", "--concurrency", "0"), "--concurrency"),
        (("bench", "--json", "/nowhere/at/all.json"), "there is no directory"),
        (("bench", "--sweep", "1,many"), "is no list of numbers"),
        (("bench", "--plot", "load.svg"), "give both"),
        (("serve", "demo", "--model", "demo"), "--model: the model is given as 'demo' too"),
        (("serve", "--access-file", "/nowhere"), "error: --access-file: cannot read /nowhere"),
        (("serve", "--tls-cert", "/nowhere", "--tls-key", "/nowhere"), "error: --tls-cert: cannot read /nowhere"),
        (("serve", "--tls-cert", "/nowhere"), "error: --tls-key: is needed with --tls-cert"),
        (("serve", "--api-key", "a key"), "--api-key: a key is empty, or has"),
        (("serve", "--api-key", "sha256:12"), "is not 64 hex digits"),
        (("serve", "--api-key", "k", "--access-file", "a"), "--access-file exclude each other"),
        (("generate", "x", "--address", "127.0.0.1"), "--address: '127.0.0.1' has no port: give host:port"),
        (("generate", "x", "--address", "10.0.0.1:1", "--token", "k"), "--api-key: would be sent"),
        (("run-batch", "/nowhere", "/nowhere"), "INPUT: cannot read /nowhere"),
        (("embed",), "give either TEXT"),
        (("embed", "x", "--file", "/nowhere"), "give either TEXT"),
        (("rerank", "x", "--file", "/nowhere"), "--file: cannot read /nowhere"),
        (("classify", "\udcff"), "TEXT: is not UTF-8"),
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
