"""The servers that the whole-service benchmark compares: how each is started, and how load is put on it.

Each is a process of its own that stays until the end. A peer runs in its own environment with the settings that suit it
best; which of them do is for the figures to say, so that it may be here more than once.
"""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from benchmarks.cpu.closed_loop import Ask, closed_loop
from benchmarks.cpu.grpc_load import calls
from benchmarks.cpu.http_load import connections
from benchmarks.cpu.open_loop import Connect
from benchmarks.cpu.shapes import CACHE, SHAPES, checkpoint
from sluice_server.services.cli.load import report

LENGTH = 64
MAX_STREAMS = 64
VENVS = CACHE.parent / "peers"
START_S = 1200.0  # the first start compiles; later ones find it in a cache
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
LIBRARIES = (Path("/usr/lib"), Path("/usr/local/lib"), VENVS / "vllm" / "lib")

Figures = dict[str, float]  # tokens_per_s, ttft_ms: the median, ttft_p99_ms
Load = Callable[[int, int, int], Figures]  # streams, requests, seed


@dataclasses.dataclass(slots=True)
class Server:
    """One that is ready.

    Attributes:
        ways: by protocol, for open loops.
        rests: stopped while others are measured: a peer's idle processes poll.
        address: where it is asked by gRPC.
        port: where it is asked by HTTP.
    """

    name: str
    process: "subprocess.Popen[str]"
    load: Load
    ways: Mapping[str, Connect]
    rests: bool = False
    address: str = ""
    port: int = 0

    def measure(self, streams: int, requests: int, seed: int) -> Figures:
        """Put load on it."""
        with self.awake():
            return self.load(streams, requests, seed)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Its processes run."""
        if not self.rests:
            yield
            return
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def stop(self) -> None:
        """End it and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def served(shape: str) -> Path:
    """A shape's checkpoint with the demo model's tokenizer, whose ids are below all of these vocabularies."""
    directory, weights = CACHE / f"{shape}-served", checkpoint(shape)
    directory.mkdir(exist_ok=True)
    for path in weights.iterdir():
        if not (directory / path.name).exists():
            os.link(path, directory / path.name)
    add_tokenizer(directory)
    return directory


def add_tokenizer(directory: Path) -> None:
    """Copies the demo model's tokenizer into a checkpoint: peers want one, also where they are given ids."""
    for name in TOKENIZER:
        shutil.copy(Path(str(resources.files("sluice_server.demo"))) / "target" / name, directory)


def start_own(shape: str, form: str, log: Path, more: Sequence[str] = ()) -> Server:
    """`sluice serve` with a number format: a dtype, or int8 or int4. `more`: further options; with --http it can be
    asked by HTTP, too."""
    flag = "--quantization" if form.startswith("int") else "--dtype"
    model = ("--model", str(served(shape)), "--served-model-name", "bench", flag, form)
    options = (*model, "--max-num-seqs", str(MAX_STREAMS), "--log-level", "warning", *more)
    return run_own(" ".join((f"sluice {form}", *_named(more))), options, log, SHAPES[shape].vocab_size)


def run_own(name: str, options: Sequence[str], log: Path, vocab: int) -> Server:
    """`sluice serve` with these options on free ports, asked by gRPC."""
    line = [sys.executable, "-m", "sluice_server"]
    process = _start([*line, "serve", "--listen", "127.0.0.1:0", *options], dict(os.environ), log, subprocess.PIPE)
    assert process.stdout is not None
    places = process.stdout.readline().partition(" on ")[2]
    address, port = places.split(",")[0], int(places.partition(" on http://127.0.0.1:")[2].split(",")[0] or 0)
    if not address:
        raise ChildProcessError(f"{name} did not start; see {log}")
    ways = {"gRPC": partial(calls, address)}
    if port:
        ways["HTTP"] = partial(connections, port, "bench")

    load = _load(ways["gRPC"], vocab)
    return Server(name, process, load, ways, address=address, port=port)


def start_vllm(shape: str, form: str, threads: int, log: Path, more: Sequence[str] = ()) -> Server | None:
    """vLLM's server with so many compute threads and further options, tcmalloc before its allocator where there is one;
    None if it is not installed."""
    python = VENVS / "vllm" / "bin" / "python"
    if not python.exists():
        print(f"vLLM: not installed in {VENVS}", flush=True)
        return None
    port = free_port()
    line = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(served(shape)), "--dtype", form]
    line += ["--served-model-name", "bench", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "1024"]
    line += ["--max-num-seqs", str(MAX_STREAMS), "--disable-uvicorn-access-log", *more]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(threads)}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "0" if threads == 1 else f"0-{threads - 1}"
    environment.pop("PYTHONPATH", None)
    name = f"vLLM {form}, {threads} thread{'s' * (threads > 1)}"
    if (library := tcmalloc()) is not None:
        environment["LD_PRELOAD"], name = str(library), f"{name}, tcmalloc"
    name = " ".join((name, *_named(more)))
    process = _start(line, environment, log, subprocess.DEVNULL)
    way = partial(connections, port, "bench")
    load = _load(way, SHAPES[shape].vocab_size)
    server = Server(name, process, load, {"HTTP": way}, rests=True, port=port)
    return at_rest(server, log)


def start_llama(options: Sequence[str], vocab: int, log: Path) -> Server | None:
    """llama.cpp's server with two compute threads and these options; None if it was not built."""
    program, name = VENVS / "llama" / "bin" / "llama-server", "llama.cpp"
    if not program.exists():
        print(f"llama.cpp's server: not in {program.parent}", flush=True)
        return None
    port = free_port()
    line = [str(program), "--host", "127.0.0.1", "--port", str(port), "--threads", "2", *options]
    process = _start(line, dict(os.environ), log, subprocess.DEVNULL)
    way = partial(connections, port, "bench")
    return at_rest(Server(name, process, _load(way, vocab), {"HTTP": way}, rests=True, port=port), log)


def at_rest(server: Server, log: Path) -> Server:
    """Waits until a peer answers, and stops it until it is measured."""
    if not _answers(server.port, server.process):
        server.stop()
        raise ChildProcessError(f"{server.name} did not start within {START_S:.0f} s; see {log}")
    os.killpg(server.process.pid, signal.SIGSTOP)
    return server


def _named(more: Sequence[str]) -> list[str]:
    """Options as they are in a server's name; where it listens says nothing of it."""
    return [part for at, part in enumerate(more) if part != "--http" and (not at or more[at - 1] != "--http")]


def tcmalloc() -> Path | None:
    """A library of it on this machine."""
    found = (path for root in LIBRARIES for path in sorted(root.rglob("libtcmalloc*.so*")))
    return next(found, None)


def _load(connect: Connect, vocab: int) -> Load:
    """A closed loop of random prompts below `vocab`."""

    def load(streams: int, requests: int, seed: int) -> Figures:
        return _figures(report(asyncio.run(closed_loop(connect, Ask(vocab, LENGTH), streams, requests, seed))))

    return load


def _figures(found: dict[str, object]) -> Figures:
    rate, ttft = found["output_tokens_per_s"], found["ttft_ms"]
    assert isinstance(rate, float) and isinstance(ttft, dict) and not found["errors"], found
    return {"tokens_per_s": rate, "ttft_ms": ttft["p50"], "ttft_p99_ms": ttft["p99"]}


def _start(line: list[str], environment: dict[str, str], log: Path, stdout: int) -> "subprocess.Popen[str]":
    with log.open("a") as errors:  # the child keeps its own
        return subprocess.Popen(line, stdout=stdout, stderr=errors, text=True, env=environment, start_new_session=True)


def _answers(port: int, process: "subprocess.Popen[str]") -> bool:
    """Whether it says that it is healthy before it has ended or START_S have passed."""
    return any(_is_healthy(port) for _ in _moments(process))


def _moments(process: "subprocess.Popen[str]") -> Iterator[None]:
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        yield
        time.sleep(0.5)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """Returns a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
