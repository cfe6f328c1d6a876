"""Measures the cost of a token in the detokenizer: decoding and matching alone, the stage, and the whole process.

    python -m benchmarks.detokenizer [--streams 32] [--steps 500] [--runs 5]

The demo's tokenizer, random ids. The process is fed as an engine feeds it: one frame a step with one token of each
stream, the next one when the texts have arrived; its CPU time counts all its threads. Least of the runs.
"""

import argparse
import asyncio
import functools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
import uvloop
import zmq

from benchmarks.machine import write
from sluice_server.services.checkpoint.model_source import resolve_model
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.detokenizer.stream import OutputText
from sluice_server.services.messages.details import Admitted
from sluice_server.services.messages.messages import Envelope, Message, Tokens
from sluice_server.services.messages.processes import Role
from sluice_server.services.messages.work import Stops, TextOptions
from sluice_server.services.ring.frames import FrameWriter, read_header
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.tokenizer.encoding import TextEncoder

STOPS = tuple(f"</{name}>" if at % 2 else f"\n{name}:" for at, name in enumerate([f"section{i}" for i in range(20)]))
MAX_BYTES = 1 << 20
FEED = "--feed"


def ids_of(encoder: TextEncoder, num: int) -> list[int]:
    """Random ids that have a token and are not special."""
    rng = random.Random(0)
    usable = [i for i in range(encoder.tokenizer.get_vocab_size()) if i not in encoder.pieces.special_ids]
    return [rng.choice(usable) for _ in range(num)]


def frames(encoder: TextEncoder, streams: int, steps: int, stops: Stops) -> list[tuple[Tokens, ...]]:
    """The frames of an engine: a token of every stream at each step."""
    ids = ids_of(encoder, streams * steps)
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    envelopes = [
        Envelope(f"{at:032x}", "gateway-0", "default", "demo", "r" * 40, "", 0, trace) for at in range(streams)
    ]
    admitted = Admitted(64, 0, steps, stops, TextOptions())
    return [
        tuple(
            Tokens(envelope, step, (ids[step * streams + at],), admitted=None if step else admitted)
            for at, envelope in enumerate(envelopes)
        )
        for step in range(steps)
    ]


def matching(encoder: TextEncoder, num: int) -> float:
    """Microseconds per token of decoding and matching the stop strings."""
    ids = [(token,) for token in ids_of(encoder, num)]
    output = OutputText(encoder, STOPS)
    start = time.perf_counter()
    for one in ids:
        output.push(one)
    assert output.stopped is None
    return (time.perf_counter() - start) / num * 1e6


def stage(encoder: TextEncoder, streams: int, steps: int, stops: Stops) -> float:
    """Microseconds per token of the stage: from its message to the one it emits."""
    sent: list[Message] = []
    made = DetokenizerStage(encoder, sent.append, lambda *_: None)
    messages = frames(encoder, streams, steps, stops)
    start = time.perf_counter()
    for frame in messages:
        for message in frame:
            made.handle(message)
        made.turn()
    took = time.perf_counter() - start
    assert len(sent) == streams * steps
    return took / (streams * steps) * 1e6


async def process(encoder: TextEncoder, streams: int, steps: int, stops: Stops) -> float:
    """Microseconds of CPU time per token of a process in its ring."""
    with tempfile.TemporaryDirectory() as directory:
        inbox, outbox = f"ipc://{directory}/in", f"ipc://{directory}/out"
        ring = RingLoop(Role.DETOKENIZER, "detokenizer-0", inbox, {"gateway-0": outbox}, MAX_BYTES)
        ring.start(DetokenizerStage(encoder, ring.emit, lambda *_: None))
        options = ["--streams", str(streams), "--steps", str(steps), *(["--stops"] if stops.strings else [])]
        feeder = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.detokenizer", FEED, inbox, outbox, *options, stdout=subprocess.PIPE
        )
        assert feeder.stdout is not None
        await feeder.stdout.readline()  # the first step is through
        start = time.process_time()
        assert await feeder.wait() == 0
        used = time.process_time() - start
        ring.stop()
    return used / (streams * (steps - 1)) * 1e6


def feed(inbox: str, outbox: str, messages: list[tuple[Tokens, ...]]) -> None:
    """Plays the engine before and the gateway behind a detokenizer, in lock step."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    source, sink = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    sink.bind(outbox)
    source.connect(inbox)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(tuple[Message, ...])
    writer = FrameWriter("engine-0", 1)
    for step, tokens in enumerate(messages):
        source.send(writer.frame(step + 1, [encoder.encode(one) for one in tokens]))
        num = 0
        while num < len(tokens):
            data = sink.recv()
            num += len(decoder.decode(data[read_header(data).size :]))
        if not step:
            print("through", flush=True)
    context.destroy(linger=0)


def in_ring(encoder: TextEncoder, streams: int, steps: int, stops: Stops) -> float:
    """Runs `process` on a loop of its own."""
    return uvloop.run(process(encoder, streams, steps, stops))


def least(runs: int, measure: Callable[[], float]) -> float:
    """The minimum of several runs: other load of the machine only adds."""
    return round(min(measure() for _ in range(runs)), 2)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--stops", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(FEED, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    encoder = TextEncoder.load(resolve_model("demo", "").directory)
    streams, steps, runs = options.streams, options.steps, options.runs
    if options.feed:
        inbox, outbox = options.feed
        feed(inbox, outbox, frames(encoder, streams, steps, Stops(STOPS if options.stops else ())))
        return
    figures: dict[str, object] = {"streams": streams}
    figures["decode_and_match_us"] = least(runs, lambda: matching(encoder, 20_000))
    for name, stops in (("", Stops()), ("_20_stops", Stops(STOPS))):
        figures[f"stage_us{name}"] = least(runs, functools.partial(stage, encoder, streams, steps, stops))
        figures[f"process_cpu_us{name}"] = least(runs, functools.partial(in_ring, encoder, streams, steps, stops))
    write("detokenizer", f"python -m benchmarks.detokenizer --streams {streams} --steps {steps} --runs {runs}", figures)


if __name__ == "__main__":
    main()
