"""What one client can do to another with legal texts, ids and grammars: the other's requests with and without.

    python -m benchmarks.attacks_text [--model demo] [--only NAME,…] [--seconds 8] [--in-flight 8] [--trees PATH,…]

Each attack is a coroutine that makes one call; a process of its own, of the lowest priority, repeats it with so many in
flight and never waits. The neighbour asks for one token, one request after the other. Figures are milliseconds of the
neighbour's requests, what became of the attacker's, and MiB of the service's processes before, during and after.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TypeAlias

import grpc
import psutil
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from benchmarks.machine import write

MIB = 1 << 20
MOST_IDS = 1 << 18  # that a request may carry
PAUSE_S = 0.01  # of the neighbour, between two requests
TIMEOUT_S = 60.0
LIMITS = (("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
Stub: TypeAlias = "inference_pb2_grpc.InferenceServiceAsyncStub"  # in quotes: only in the type stubs
Attack = Callable[[grpc.aio.Channel, random.Random], Awaitable[object]]


def text_of(num_bytes: int, seed: int = 1) -> str:
    """Words of random letters, which no cache of words holds."""
    rng = random.Random(seed)
    letters = rng.choices("abcdefghijklmnopqrstuvwxyz", k=num_bytes)
    for at in range(5, num_bytes, 6):
        letters[at] = " "
    return "".join(letters)


LONG = text_of(MIB)


def one_token(text: str, keep_last: int | None = None) -> inference_pb2.GenerateRequest:
    """A request for one token, behind so many of the prompt's last ones."""
    sampling = types_pb2.SamplingParams(max_tokens=1, temperature=0.0)
    return inference_pb2.GenerateRequest(
        spec=types_pb2.GenerationSpec(text=text, sampling=sampling, truncate_prompt_tokens=keep_last)
    )


def call(channel: grpc.aio.Channel, method: str, request: bytes) -> Awaitable[bytes]:
    """A call whose answer is not parsed: the attacker shall cost itself little."""
    made: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/sluice.v1.InferenceService/{method}")
    return made(request, timeout=TIMEOUT_S)


_TOO_LONG = one_token(LONG).SerializeToString()
_TRUNCATED = one_token(LONG, keep_last=10).SerializeToString()
_TOKENIZE = inference_pb2.TokenizeRequest(text=LONG).SerializeToString()
_DETOKENIZE = inference_pb2.DetokenizeRequest(token_ids=[300 + at % 700 for at in range(MOST_IDS)]).SerializeToString()
_IDS = inference_pb2.GenerateRequest(
    spec=types_pb2.GenerationSpec(token_ids=types_pb2.TokenIds(ids=[300 + at % 700 for at in range(MOST_IDS)]))
).SerializeToString()


async def refused_as_too_long(channel: grpc.aio.Channel, rng: random.Random) -> object:
    """1 MiB of text that no context holds."""
    return await call(channel, "Generate", _TOO_LONG)


async def truncated(channel: grpc.aio.Channel, rng: random.Random) -> object:
    """1 MiB of text of which 10 tokens are kept."""
    return await call(channel, "Generate", _TRUNCATED)


async def tokenize(channel: grpc.aio.Channel, rng: random.Random) -> object:
    """Ids and pieces of 1 MiB."""
    return await call(channel, "Tokenize", _TOKENIZE)


async def detokenize(channel: grpc.aio.Channel, rng: random.Random) -> object:
    """The text of as many ids as may be sent."""
    return await call(channel, "Detokenize", _DETOKENIZE)


async def too_many_ids(channel: grpc.aio.Channel, rng: random.Random) -> object:
    """A prompt of as many ids as may be sent."""
    return await call(channel, "Generate", _IDS)


async def middling(channel: grpc.aio.Channel, rng: random.Random) -> object:
    """16 KiB of text, truncated: as much as is still thought short."""
    text = LONG[: 16 << 10]
    return await call(channel, "Generate", one_token(text, keep_last=10).SerializeToString())


async def regexes(channel: grpc.aio.Channel, rng: random.Random) -> object:
    """A new small expression in each request, whose automaton grows as it is followed."""
    request = one_token("x = ")
    request.spec.sampling.max_tokens = 16
    request.spec.constraint.regex = f"(.*a.{{0,12}}){{3}}{rng.randrange(10**12):012d}"
    return await call(channel, "Generate", request.SerializeToString())


async def schemas(channel: grpc.aio.Channel, rng: random.Random) -> object:
    """Honest traffic with a schema of its own in each request."""
    name = f"p{rng.randrange(10**9)}"
    properties = {f"{name}_{at}": {"type": kind} for at, kind in enumerate(("string", "integer", "boolean") * 2)}
    request = one_token("x = ")
    request.spec.sampling.max_tokens = 16
    request.spec.constraint.json_schema = json.dumps(
        {"type": "object", "properties": properties, "required": list(properties)}
    )
    return await call(channel, "Generate", request.SerializeToString())


ATTACKS: dict[str, Attack] = {
    "too_long": refused_as_too_long,
    "truncated": truncated,
    "tokenize": tokenize,
    "detokenize": detokenize,
    "too_many_ids": too_many_ids,
    "middling": middling,
    "regexes": regexes,
    "schemas": schemas,
}


async def _repeat(attack: Attack, address: str, in_flight: int, stop: Event) -> Counter[str]:
    """So many at once, each again as soon as it has ended, until told to stop."""
    outcomes: Counter[str] = Counter()

    async def one(number: int) -> None:
        rng = random.Random(f"{attack.__name__} {number}")
        while not stop.is_set():
            try:
                await attack(channel, rng)
                outcomes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[error.code().name] += 1

    async with grpc.aio.insecure_channel(address, options=LIMITS) as channel:
        await asyncio.gather(*[one(number) for number in range(in_flight)])
    return outcomes


def attacker(name: str, address: str, in_flight: int, stop: Event) -> None:
    """The body of the attacker's process. It takes no processor that the service wants: it stands for another host."""
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outcomes = asyncio.run(_repeat(ATTACKS[name], address, in_flight, stop))
    print(f"    attacker: {dict(outcomes)}", flush=True)


@contextlib.contextmanager
def attacked(name: str, address: str, in_flight: int) -> Iterator[None]:
    """The attack goes on for as long as the block lasts."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=attacker, args=(name, address, in_flight, stop))
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join(2 * TIMEOUT_S)
        process.kill()


@dataclasses.dataclass
class SeenNeighbour:
    """What the neighbour saw."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    errors: Counter[str] = dataclasses.field(default_factory=Counter)

    def figures(self) -> dict[str, object]:
        """Milliseconds."""
        ordered = sorted(self.seconds) or [float("nan")]
        at = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
        return {
            **{name: round(ordered[place] * 1e3, 1) for name, place in at.items()},
            "requests": len(self.seconds),
            "errors": dict(self.errors),
        }


async def neighbour(address: str, seconds: float) -> SeenNeighbour:
    """A client that asks for one token again and again."""
    seen, request = SeenNeighbour(), one_token("def mean(values):").SerializeToString()
    async with grpc.aio.insecure_channel(address, options=LIMITS) as channel:
        end = time.monotonic() + seconds
        while (start := time.monotonic()) < end:
            try:
                await call(channel, "Generate", request)
            except grpc.aio.AioRpcError as error:
                seen.errors[error.code().name] += 1
            seen.seconds.append(time.monotonic() - start)
            await asyncio.sleep(PAUSE_S)
    return seen


@contextlib.contextmanager
def serving(tree: Path, model: str, options: list[str]) -> Iterator[tuple[str, psutil.Process]]:
    """A service of that tree with default settings: its address and its supervisor."""
    line = [sys.executable, "-m", "sluice_server", "serve", "--model", model, "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "clients" / "python" / "src")])}
    with subprocess.Popen(
        [*line, "--log-level", "warning", *options], stdout=subprocess.PIPE, text=True, env=environment, cwd=tree
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().partition(" on ")[2].split(",")[0], psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


def memory(service: psutil.Process) -> dict[str, int]:
    """MiB of the service's processes, children of a process with it."""
    found: dict[str, int] = {}
    for child in service.children():
        with contextlib.suppress(psutil.Error):
            name = " ".join(child.cmdline()).removeprefix("sluice: ").strip()
            family = [child, *child.children(recursive=True)]
            found[name] = sum([one.memory_info().rss for one in family]) // MIB
    return found


def measure(tree: Path, options: argparse.Namespace) -> dict[str, object]:
    """Every attack on one tree's service, each beside the same client without."""
    found: dict[str, object] = {}
    for name in options.only.split(",") if options.only else ATTACKS:
        with serving(tree, options.model, options.serve) as (address, service):
            asyncio.run(neighbour(address, 1.0))
            before = memory(service)
            alone = asyncio.run(neighbour(address, options.seconds)).figures()
            with attacked(name, address, options.in_flight):
                asyncio.run(neighbour(address, 1.0))  # until the attack has begun
                beside = asyncio.run(neighbour(address, options.seconds)).figures()
                during = memory(service)
            after = memory(service)
        found[name] = {"alone_ms": alone, "beside_ms": beside, "mib": [before, during, after]}
        print(f"{tree.name} {name}: alone {alone}, beside {beside}", flush=True)
        print("    MiB before, during, after:", *[{k: one.get(k) for k in before} for one in (before, during, after)])
    return found


def main() -> None:
    """Measure, show, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", default="", help="names of attacks, comma-separated")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--trees", default=str(Path(__file__).parents[1]))
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/attacks_text.json")
    parser.add_argument("serve", nargs="*", help="options of `sluice serve`, behind --")
    options = parser.parse_args()
    found = {tree: measure(Path(tree), options) for tree in options.trees.split(",")}
    if options.keep:
        write("attacks_text", "python -m benchmarks.attacks_text", {"services": list(found.values())})


if __name__ == "__main__":
    main()
