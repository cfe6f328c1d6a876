"""What clients notice when processes of the ring are killed: lost streams, lost or repeated tokens, pauses.

    python -m benchmarks.recovery [--seeds 20] [--streams 32] [--tokens 64]

Each process is killed while prompts are computed, in the midst of decoding, and when the first stream has ended,
once per seed, in one service that is never restarted as a whole. The requests are of every kind that a replay must not
disturb; every answer is compared with that of the same service before anything was killed. The clients of a killed
gateway resume, as SDKs do, at the one that takes its place; a search, of which nothing was received, begins again.
"""

import argparse
import collections
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.machine import write
from benchmarks.streams import Received, at_phase, stream_all, varied
from services.supervisor.restarts import SOON_S

ROLES = ("tokenizer", "engine", "detokenizer", "gateway")
PHASES = ("prefill", "decode", "last")
SERVE = (sys.executable, "-m", "services.cli.main", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning")
OPTIONS = ("--dtype", "float32", "--max-restarts", "100000", "--max-num-batched-tokens", "256")
POLL_S = 0.02
BACK_WITHIN_S = 60.0


class Watch(threading.Thread):
    """Asks for the service's health all the time; notes when it changed."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.changes: collections.deque[tuple[float, bool]] = collections.deque([(0.0, True)])
        self._address = address

    def run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                serving = False  # also while nobody answers
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
                if serving is not self.changes[-1][1]:
                    self.changes.append((time.monotonic(), serving))
                time.sleep(POLL_S)

    def after(self, at_s: float, serving: bool) -> float | None:
        """Seconds from `at_s` until it was first so; None while it was not."""
        return next((when - at_s for when, what in tuple(self.changes) if what is serving and when >= at_s), None)

    def is_back(self, at_s: float) -> bool:
        """Whether it has been lost and found since."""
        lost = self.after(at_s, serving=False)
        return lost is not None and self.after(at_s + lost, serving=True) is not None


@contextlib.contextmanager
def served() -> Iterator[tuple[str, psutil.Process]]:
    """A service: its address, its supervisor."""
    with subprocess.Popen([*SERVE, *OPTIONS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split(" on ")[1].split(",")[0], psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


def child(supervisor: psutil.Process, name: str) -> psutil.Process:
    """A process of the ring by its id."""
    return next(one for one in supervisor.children() if name in " ".join(one.cmdline()))


class Campaign:
    """Kills, and what came of them."""

    def __init__(self, address: str, supervisor: psutil.Process, num_streams: int, num_tokens: int) -> None:
        self._address = address
        self._supervisor = supervisor
        self._specs = varied(num_streams, num_tokens)
        self._watch = Watch(address)
        self._watch.start()
        self._undisturbed = stream_all(address, self._specs)
        self.lost = 0
        self.broken = 0
        self.different = 0
        self.broken_sequences = 0
        self.pauses_s: list[float] = []
        self.noticed_s: list[float] = []
        self.back_s: list[float] = []

    def kill(self, role: str, phase: str, seed: int) -> None:
        """Kill once under load."""
        killed_at = 0.0

        def harm() -> None:
            nonlocal killed_at
            child(self._supervisor, f"{role}-0").kill()
            killed_at = time.monotonic()

        answers = stream_all(self._address, self._specs, at_phase(phase, seed, harm))
        self._compare(answers)
        end = time.monotonic() + BACK_WITHIN_S
        while not self._watch.is_back(killed_at) and time.monotonic() < end:
            time.sleep(POLL_S)
        time.sleep(SOON_S)  # what ends as soon as it is back is made to wait: no pause of ours
        noticed = self._watch.after(killed_at, serving=False)
        back = None if noticed is None else self._watch.after(killed_at + noticed, serving=True)
        self.noticed_s.append(BACK_WITHIN_S if noticed is None else noticed)
        self.back_s.append(BACK_WITHIN_S if noticed is None or back is None else noticed + back)

    def _compare(self, answers: list[Received]) -> None:
        for answer, expected in zip(answers, self._undisturbed, strict=True):
            self.lost += bool(answer.error)
            self.broken += bool(answer.num_broken)
            self.different += not answer.error and answer.answer != expected.answer
            self.broken_sequences += answer.seqs != list(range(1, len(answer.seqs) + 1))
            self.pauses_s.append(answer.longest_gap_s)


def at(values: list[float], share: float) -> float:
    """Nearest rank, in seconds."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def main() -> None:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    figures: dict[str, object] = {}
    with served() as (address, supervisor):
        for role in ROLES:
            campaign = Campaign(address, supervisor, options.streams, options.tokens)
            for number, (phase, seed) in enumerate((phase, seed) for phase in PHASES for seed in range(options.seeds)):
                campaign.kill(role, phase, seed)
                print(f"{role} {number + 1}/{len(PHASES) * options.seeds}: lost {campaign.lost}", file=sys.stderr)
            figures[role] = {
                "kills": len(PHASES) * options.seeds,
                "streams": len(campaign.pauses_s),
                "streams_lost": campaign.lost,
                "streams_resumed_by_their_clients": campaign.broken,
                "answers_different": campaign.different,
                "sequence_numbers_broken": campaign.broken_sequences,
                "pause_p50_s": at(campaign.pauses_s, 0.5),
                "pause_p99_s": at(campaign.pauses_s, 0.99),
                "not_serving_after_s_worst": at(campaign.noticed_s, 1.0),
                "serving_again_after_s_p50": at(campaign.back_s, 0.5),
                "serving_again_after_s_worst": at(campaign.back_s, 1.0),
            }
            print(json.dumps({role: figures[role]}, indent=2), file=sys.stderr)
    command = f"python -m benchmarks.recovery --seeds {options.seeds} --streams {options.streams}"
    write("recovery", f"{command} --tokens {options.tokens}", figures)


if __name__ == "__main__":
    main()
