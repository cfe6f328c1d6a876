"""Measures where the time of a first token goes, hop by hop, for one stream: closed loop, 64 random tokens in, 64 out.

    python -m benchmarks.first_token [--shape 6.5M] [--form float32] [--trees PATH,…] [--requests 300] [--pause 0]

Every process of the service notes when it does what (`hops`); all of them read one clock. Each tree is a checkout whose
service is measured, all in turn, a request each, so that a change is seen beside what it changes. A figure is a median,
lower quartile and least, in microseconds: of a hop, from the mark before it. The fourth is the mean of the two
percent of requests whose first tokens came last: it shows which hops hold a tail.
"""

import argparse
import asyncio
import bisect
import contextlib
import dataclasses
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import sluice
import uvloop

from benchmarks.cpu.servers import LENGTH, served
from benchmarks.machine import median, write
from sluice_server.services.cli.load import random_prompt

HOPS = (  # process, mark, what has happened since the mark before
    ("gateway-0", "stream_generate", "client to handler"),
    ("gateway-0", "sent Submit", "checked, translated, opened, sent"),
    ("tokenizer-0", "woken by Submit", "ring to tokenizer"),
    ("tokenizer-0", "answer", "a thread of it begins"),
    ("tokenizer-0", "answer done", "ids checked"),
    ("tokenizer-0", "sent Prompt", "back on the loop, sent"),
    ("engine-0", "woken by Prompt", "ring to engine"),
    ("engine-0", "step", "read, checked, queued"),
    ("engine-0", "plan done", "planned"),
    ("engine-0", "forward", "placed, laid out"),
    ("engine-0", "forward done", "prompt computed"),
    ("engine-0", "sample", "logits"),
    ("engine-0", "sample done", "sampled"),
    ("engine-0", "step done", "applied"),
    ("engine-0", "sent Tokens", "sent"),
    ("detokenizer-0", "woken by Tokens", "ring to detokenizer"),
    ("detokenizer-0", "sent Text", "text made, sent"),
    ("gateway-0", "woken by Text", "ring to gateway"),
    ("gateway-0", "begin_write", "added to its request, taken by its writer"),
    ("gateway-0", "end_write", "made and written, with that it was accepted"),
)
ARRIVED = "gateway to client"
SLOWEST = 50  # one in so many requests is among the slowest


@dataclasses.dataclass(slots=True)
class TreeServer:
    """A service of one tree, its client, and when its requests began, had a token and ended."""

    name: str
    process: "subprocess.Popen[str]"
    client: sluice.AsyncClient
    marks: Path
    asked: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)

    async def ask(self, rng: random.Random) -> None:
        """Sends one request."""
        prompt = random_prompt(rng, 1000, LENGTH)
        start, first = time.monotonic(), 0.0
        stream = self.client.stream(prompt, max_tokens=LENGTH, temperature=0.0, ignore_eos=True, token_records=False)
        async for _ in stream:
            first = first or time.monotonic()
        self.asked.append((start, first, time.monotonic()))


@contextlib.contextmanager
def serving(tree: Path, options: argparse.Namespace) -> Iterator[TreeServer]:
    """Runs a service of that tree; its marks can be read after the block."""
    flag = "--quantization" if options.form.startswith("int") else "--dtype"
    line = [sys.executable, "-m", "sluice_server", "serve", "--model", str(served(options.shape))]
    line += ["--listen", "127.0.0.1:0", flag, options.form, "--max-num-seqs", "64", "--log-level", "warning"]
    marks = Path(tempfile.mkdtemp(prefix="hops-"))
    path = [str(Path(__file__).parent / "hops"), str(tree), str(tree / "clients" / "python" / "src")]
    path += filter(None, [os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HOPS_DIR": str(marks)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().partition(" on ")[2].split(",")[0]
            yield TreeServer(str(tree), process, sluice.AsyncClient(address, retry=sluice.NEVER, channels=1), marks)
        finally:
            process.send_signal(signal.SIGTERM)


async def ask_all(servers: Sequence[TreeServer], options: argparse.Namespace) -> None:
    """Sends requests to each service, one after the other; the first ones are not counted."""
    rng = random.Random(options.seed)
    for number in range(options.warmup + options.requests):
        if number == options.warmup:
            for server in servers:
                server.asked.clear()
        for server in servers if number % 2 else reversed(servers):
            await server.ask(rng)
            await asyncio.sleep(options.pause)
    for server in servers:
        await server.client.close()


def read(path: Path) -> tuple[list[float], list[str]]:
    """The marks of a process, in order."""
    found = sorted((float(at), name) for at, _, name in (line.partition(" ") for line in path.read_text().splitlines()))
    return [at for at, _ in found], [name for _, name in found]


def spans(server: TreeServer) -> dict[str, list[float]]:
    """The seconds of each hop, of every request with all its marks, in the order of their times to the first token."""
    marks = {path.name: read(path) for path in server.marks.iterdir()}
    found: dict[str, list[float]] = {}
    for start, first, _ in sorted(server.asked, key=lambda times: times[1] - times[0]):
        at, taken = start, []
        places = {process: bisect.bisect(times, start) for process, (times, _) in marks.items()}
        for process, mark, _ in HOPS:
            times, names = marks[process]
            place = next((i for i in range(places[process], len(names)) if names[i] == mark), None)
            if place is None:
                break
            places[process] = place + 1
            taken.append(times[place] - at)
            at = times[place]
        if len(taken) < len(HOPS):
            continue
        for number, seconds in enumerate([*taken, first - at]):
            what = HOPS[number][2] if number < len(HOPS) else ARRIVED
            process = HOPS[number][0] if number < len(HOPS) else "client"
            found.setdefault(f"{number + 1:2} {process}: {what}", []).append(seconds)
    return found


def figures(values: Sequence[float]) -> dict[str, int]:
    """The figures in microseconds, of values in the order of their requests' times to the first token."""
    ordered = sorted(values)
    return {
        "p50": round(median(ordered) * 1e6),
        "p99": round(ordered[len(ordered) * 99 // 100] * 1e6),
        "p25": round(ordered[len(ordered) // 4] * 1e6),
        "min": round(ordered[0] * 1e6),
        "slowest": round(statistics.fmean(values[-(len(values) // SLOWEST or 1) :]) * 1e6),
    }


def table(server: TreeServer) -> dict[str, object]:
    """The results of one server."""
    return {
        "ttft_us": figures(sorted(first - start for start, first, _ in server.asked)),
        "tokens_per_s": round(median([LENGTH / (end - start) for start, _, end in server.asked]), 1),
        "hops_us": {name: figures(values) for name, values in spans(server).items()},
    }


def show(tables: dict[str, dict[str, object]]) -> None:
    """Prints hops as lines, servers as columns."""
    for name, found in tables.items():
        print(f"{name}: TTFT {found['ttft_us']} µs, {found['tokens_per_s']} tokens/s")
    columns = [found["hops_us"] for found in tables.values()]
    assert all(isinstance(column, dict) for column in columns)
    for hop in columns[0] if isinstance(columns[0], dict) else ():
        cells = [column.get(hop, {}) for column in columns if isinstance(column, dict)]
        print("  ".join("{p50:>6}{p25:>6}{min:>6}{slowest:>7}".format(**cell) for cell in cells if cell), hop)


def main() -> None:
    """Measure, show, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="6.5M")
    parser.add_argument("--form", default="float32")
    parser.add_argument("--trees", default=str(Path(__file__).parents[1]))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/first_token.json")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving(Path(tree), options)) for tree in options.trees.split(",")]
        uvloop.run(ask_all(servers, options))
    tables = {server.name: table(server) for server in servers}
    show(tables)
    if options.keep:
        line = f"python -m benchmarks.first_token --shape {options.shape} --form {options.form}"
        about = {"requests": options.requests, "pause_s": options.pause}
        write("first_token", f"{line} --requests {options.requests}", {**about, "services": list(tables.values())})


if __name__ == "__main__":
    main()
