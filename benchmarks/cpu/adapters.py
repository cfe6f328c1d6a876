"""Eight adapters with four streams each, on one base, beside vLLM's and llama.cpp's servers: tokens a second.

    python -m benchmarks.cpu.adapters [--shape 61M] [--adapters 8] [--streams 4] [--runs 5] [--only TEXT,…]

Random adapters of rank 16 on all projections, 64 random tokens in and 64 out, greedy; every stream of an adapter sends
one request after the other. Servers stay up and take turns; the load generator shares the machine with them. vLLM runs
with the settings that `peer_settings` has found for the shape, llama.cpp's server in float32 with a slot for each
stream. Beside them the same streams of the base alone, from the same servers: what adapters cost each.
"""

import argparse
import asyncio
import dataclasses
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial
from pathlib import Path

from benchmarks.adapter_rig import RANK, write_adapters
from benchmarks.cpu.closed_loop import sample_of
from benchmarks.cpu.goodput import Flight
from benchmarks.cpu.grpc_load import calls
from benchmarks.cpu.http_load import connections
from benchmarks.cpu.open_loop import Completion, Send
from benchmarks.cpu.peer_settings import best_of, settings_path
from benchmarks.cpu.servers import LENGTH, VENVS, Server, start_llama, start_own, start_vllm
from benchmarks.cpu.shapes import CACHE, SHAPES, checkpoint
from benchmarks.machine import end_as_asked, median, write
from sluice_server.services.cli.load import RequestSample, random_prompt, report

ROUNDS = 4  # requests of a stream
CONTEXT = 256  # of a slot of llama.cpp's
FILES = Path(__file__).parent / "peers" / "llama_cpp_lora_files.py"
Connect = Callable[[str], AbstractAsyncContextManager[Send]]  # by the name of an adapter, "" for the base


@dataclasses.dataclass(frozen=True, slots=True)
class Contestant:
    """A way to ask a server for adapters."""

    name: str
    server: Server
    connect: Connect


def own(options: argparse.Namespace, folder: Path, log: Path) -> Iterator[Contestant]:
    """`sluice serve`, by gRPC and by HTTP."""
    write_adapters(folder, options.shape, options.adapters, RANK)
    more = ("--adapter-dir", str(folder), "--max-adapters", str(options.adapters), "--http", "127.0.0.1:0")
    server = start_own(options.shape, options.form, log, more)
    yield Contestant(f"sluice {options.form}, gRPC", server, partial(calls, server.address))
    yield Contestant(f"sluice {options.form}, HTTP", server, partial(by_http, server.port))


def vllm(options: argparse.Namespace, folder: Path, log: Path) -> Iterator[Contestant]:
    """vLLM's server with all adapters in its slots."""
    best = best_of(settings_path(options.shape))
    named = [f"{index}={folder / str(index)}" for index in range(options.adapters)]
    slots = ("--max-loras", str(options.adapters), "--max-lora-rank", str(RANK), "--lora-modules", *named)
    server = start_vllm(options.shape, best.form, best.threads, log, (*best.options(), "--enable-lora", *slots))
    if server is not None:
        yield Contestant(f"vLLM {best.form}, HTTP", server, partial(by_http, server.port))


def llama(options: argparse.Namespace, folder: Path, log: Path) -> Iterator[Contestant]:
    """llama.cpp's server, where it was built beside its Python package."""
    if not write_llama_files(options.shape, folder, options.adapters):
        return
    num = options.adapters * options.streams
    adapters = [part for index in range(options.adapters) for part in ("--lora", str(folder / f"{index}.gguf"))]
    shape = ("--parallel", str(num), "--ctx-size", str(num * CONTEXT), "--lora-init-without-apply", *adapters)
    base = ("--model", str(folder / "base.gguf"))
    server = start_llama((*base, *shape), SHAPES[options.shape].vocab_size, log)
    if server is None:
        return

    def connect(adapter: str) -> AbstractAsyncContextManager[Send]:
        scales = [{"id": index, "scale": float(str(index) == adapter)} for index in range(options.adapters)]
        return connections(server.port, "bench", {"lora": scales}, keeps=False)

    yield Contestant("llama.cpp float32, HTTP", server, connect)


def write_llama_files(shape: str, folder: Path, num_adapters: int) -> bool:
    """Writes base.gguf and the adapters, 0.gguf and so on; False if llama.cpp's package is not installed."""
    python, config = VENVS / "llama" / "bin" / "python", checkpoint(shape) / "config.json"
    if not python.exists():
        print(f"llama.cpp: not installed in {VENVS}", flush=True)
        return False
    line = [str(python), str(FILES), str(config), str(folder), str(num_adapters), str(RANK)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(line, check=True, env=environment, stderr=subprocess.DEVNULL)
    return True


def by_http(port: int, adapter: str) -> AbstractAsyncContextManager[Send]:
    """A way to send for an adapter that is a model's name; "" is the base."""
    return connections(port, adapter or "bench")


async def loaded(connect: Connect, names: Sequence[str], options: argparse.Namespace, seed: int) -> list[RequestSample]:
    """Samples of all streams of these adapters."""
    samples: list[RequestSample] = []

    async def stream(send: Send, rng: random.Random) -> None:
        for _ in range(ROUNDS):
            one = Completion(random_prompt(rng, SHAPES[options.shape].vocab_size, LENGTH), LENGTH)
            flight = Flight(time.perf_counter(), one.num_tokens)
            await send(one, flight)
            samples.append(sample_of(flight))

    async def of_adapter(name: str, first: int) -> None:
        async with connect(name) as send:
            await asyncio.gather(*(stream(send, random.Random(first + at)) for at in range(options.streams)))

    await asyncio.gather(*(of_adapter(name, seed + 100 * at) for at, name in enumerate(names)))
    return samples


def measured(one: Contestant, names: Sequence[str], options: argparse.Namespace, seed: int) -> float:
    """Tokens a second."""
    with one.server.awake():
        found = report(asyncio.run(loaded(one.connect, names, options, seed)))
    rate = found["output_tokens_per_s"]
    assert isinstance(rate, float) and not found["errors"], found
    return rate


def compare(all_of: Sequence[Contestant], options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Rates of each contestant with adapters and of the base alone, in turn."""
    adapters = [str(index) for index in range(options.adapters)]
    kinds = {"adapters": adapters, "base": [""] * options.adapters}
    rates: dict[str, dict[str, list[float]]] = {one.name: {kind: [] for kind in kinds} for one in all_of}
    for run in range(-1, options.runs):  # the first warms up
        for kind, names in kinds.items():
            for one in all_of:
                rate = measured(one, names, options, 10_000 * (run + 2))
                if run >= 0:
                    rates[one.name][kind].append(rate)
                    print(f"run {run}, {kind}, {one.name}: {rate:.0f} tok/s", flush=True)
    return rates


def table(rates: dict[str, dict[str, list[float]]]) -> dict[str, object]:
    """Medians and spread, and ours over each peer's by adapters."""
    rows = {
        name: {kind: {"median": median(of), "least": min(of), "most": max(of)} for kind, of in kinds.items()}
        for name, kinds in rates.items()
    }
    ratios = {
        f"{name} / {peer}": round(rows[name]["adapters"]["median"] / rows[peer]["adapters"]["median"], 2)
        for name in rows
        for peer in rows
        if name.startswith("sluice") and not peer.startswith("sluice")
    }
    return {"tokens_per_s": rows, "ratios": ratios}


def main() -> None:
    """Measure in turn and write the table."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="61M", choices=tuple(SHAPES))
    parser.add_argument("--form", default="float32", help="of our server")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4, help="of each adapter")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", default="own,vllm,llama")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    log, started = CACHE / "adapters.log", {"own": own, "vllm": vllm, "llama": llama}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        contestants: list[Contestant] = []
        for name in options.only.split(","):
            for one in started[name](options, Path(folder), log):
                contestants.append(one)
                stack.callback(one.server.stop)
                print(f"{one.name}: ready", flush=True)
        rates = compare(contestants, options)
    command = f"python -m benchmarks.cpu.adapters --shape {options.shape} --form {options.form} --runs {options.runs}"
    write(f"cpu_adapters_{options.shape}", command, table(rates))


if __name__ == "__main__":
    main()
