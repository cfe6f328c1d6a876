"""Measures what streams at other engines notice while one of several engines is down.

    python -m benchmarks.engine_loss [--engines 3] [--streams 4] [--rounds 3] [--stop]

Streams are bound to their engines by sessions, and no two have the same text, which other engines might keep in their
caches. An engine is killed, or stopped with `--stop`, when all of them decode;
gaps between tokens are those of the other engines' streams, before, and from the loss until the engine serves again.
The longest gap of the lost engine's own streams is told apart. Starting an engine again takes seconds of a core: with
fewer cores than engines and one more, others wait for that.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import grpc
import psutil
from sluice.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.requests.engines import engine_of
from sluice_server.services.gateway.requests.envelope import session_of

NUM_TOKENS = 1_900
SETTLED_S = 3.0  # of decoding before the loss
OPTIONS = ("--dtype", "float32", "--threads", "1", "--max-restarts", "1000", "--probe-timeout-s", "1")


class TimedStream(threading.Thread):
    """One stream of an engine, and when its tokens came."""

    def __init__(self, address: str, session: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.came_s: list[float] = []
        self.error = ""
        self._address = address
        self._session = session
        self._seed = seed

    def run(self) -> None:
        """Reads to the end."""
        params = types_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=self._seed)
        spec = types_pb2.GenerationSpec(text="def f(", sampling=params)
        spec.stop.ignore_eos = True
        with grpc.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            metadata = (("x-sluice-session", self._session),)
            try:
                for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec), metadata=metadata):
                    if event.HasField("delta"):
                        self.came_s.append(time.monotonic())
            except grpc.RpcError as error:
                self.error = str(error)

    def gaps_ms(self, first_s: float, end_s: float) -> list[float]:
        """Returns the gaps that end between two times."""
        pairs = zip(self.came_s, self.came_s[1:], strict=False)
        return [1000 * (late - early) for early, late in pairs if first_s <= late < end_s]


def sessions_of(engines: Sequence[str], num: int) -> dict[str, list[str]]:
    """Returns `num` names of sessions for each engine."""
    found: dict[str, list[str]] = {name: [] for name in engines}
    at = 0
    while any(len(one) < num for one in found.values()):
        own = found[engine_of(session_of(CallMetadata("", session=f"s{at}")), engines)]
        if len(own) < num:
            own.append(f"s{at}")
        at += 1
    return found


def p99(gaps: Sequence[float]) -> float:
    """Returns the 99th percentile."""
    return sorted(gaps)[int(0.99 * len(gaps))]


def serve(address: str, num: int) -> bool:
    """Whether as many engines serve: what comes earlier goes to those that do, whatever its session."""
    return [*states(address).values()] == [control_pb2.ENGINE_STATE_SERVING] * num


def states(address: str) -> dict[str, int]:
    """Returns the state of each engine as the gateway sees it."""
    with grpc.insecure_channel(address) as channel:
        load = control_pb2_grpc.ControlServiceStub(channel).GetLoad(control_pb2.GetLoadRequest(), timeout=5).load
    return {one.engine_id: int(one.state) for one in load.engines}


def one_round(
    address: str, supervisor: psutil.Process, engines: Sequence[str], num: int, seeds: Iterator[int], *, stops: bool
) -> dict[str, float]:
    """Loses the first engine once; returns the figures."""
    victim = engines[0]
    pid = next(one for one in supervisor.children() if victim in " ".join(one.cmdline()))
    by_engine = {
        name: [TimedStream(address, session, next(seeds)) for session in own]
        for name, own in sessions_of(engines, num).items()
    }
    streams = [one for own in by_engine.values() for one in own]
    for one in streams:
        one.start()
    while not all(one.came_s for one in streams):
        time.sleep(0.01)
    start_s = time.monotonic()
    time.sleep(SETTLED_S)
    lost_s = time.monotonic()
    pid.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
    time.sleep(0.5)
    while not serve(address, len(engines)) and any(one.is_alive() for one in streams):
        time.sleep(0.05)
    back_s = time.monotonic()
    for one in streams:
        one.join()
    while not serve(address, len(engines)):
        time.sleep(0.05)
    assert not [one.error for one in streams if one.error], [one.error for one in streams if one.error]
    others = [one for name, own in by_engine.items() if name != victim for one in own]
    before = [gap for one in others for gap in one.gaps_ms(start_s, lost_s)]
    during = [gap for one in others for gap in one.gaps_ms(lost_s, back_s)]
    moved = max(gap for one in by_engine[victim] for gap in one.gaps_ms(lost_s, back_s + 60))
    return {
        "down_s": back_s - lost_s,
        "before_p99_ms": p99(before),
        "during_p99_ms": p99(during),
        "ratio": p99(during) / p99(before),
        "moved_longest_gap_ms": moved,
    }


def main() -> None:
    """Print the figures of each round, and their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4, help="of each engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stop", action="store_true", help="stop it instead of killing it")
    options = parser.parse_args()
    engines = [f"engine-{at}" for at in range(options.engines)]
    service = (sys.executable, "-m", "sluice_server", "serve", "--listen", "127.0.0.1:0", "--log-level", "error")
    command = [*service, *OPTIONS, "--engines", str(options.engines)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split(" on ")[1].split(",")[0]
            supervisor = psutil.Process(process.pid)
            while not serve(address, options.engines):
                time.sleep(0.05)
            rounds, seeds = [], itertools.count()
            for _ in range(options.rounds):
                rounds.append(one_round(address, supervisor, engines, options.streams, seeds, stops=options.stop))
                print(json.dumps({name: round(value, 2) for name, value in rounds[-1].items()}))
            medians = {name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]}
            print(f"medians {json.dumps(medians)}")
        finally:
            process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
