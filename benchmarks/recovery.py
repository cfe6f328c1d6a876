"""Measures what clients notice when processes of the ring are killed, hang or are overloaded.

    python -m benchmarks.recovery [--seeds 20] [--hangs 5] [--saturated-s 60] [--streams 32] [--tokens 64]

Each process in turn is killed while prompts are computed, in the midst of decoding, and when the first stream has
ended, once per seed, in one service that is never restarted as a whole; then each is stopped (SIGSTOP) for good. The
requests are of every kind that a replay must not disturb; every answer is compared with that of the same service before
anything happened to it. The clients of a gateway that is gone resume, as SDKs do, at the one that takes its place; a
search, of which nothing was received, begins again. Last, a service that has far more to do than it can is watched:
none of its processes may be taken for stuck.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil

from benchmarks.health import HealthWatch
from benchmarks.machine import end_as_asked, write
from benchmarks.streams import at_phase, stream_all, varied
from sluice_server.services.supervisor.restarts import SOON_S

ROLES = ("tokenizer", "engine", "detokenizer", "gateway")
PHASES = ("prefill", "decode", "last")
SERVE = (sys.executable, "-m", "sluice_server", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning")
OPTIONS = ("--dtype", "float32", "--max-restarts", "100000", "--max-num-batched-tokens", "256")
BACK_WITHIN_S = 60.0
NUM_STARTS = 3
SATURATED = (96, 400)  # streams at once, tokens of each prompt

Harm = Callable[[psutil.Process], None]


@contextlib.contextmanager
def served() -> Iterator[tuple[str, psutil.Process]]:
    """A running service: its address and its supervisor."""
    with subprocess.Popen([*SERVE, *OPTIONS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split(" on ")[1].split(",")[0], psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


def child(supervisor: psutil.Process, role: str) -> psutil.Process:
    """The first process of a role."""
    return next(one for one in supervisor.children() if f"{role}-0" in " ".join(one.cmdline()))


@dataclasses.dataclass
class FaultOutcome:
    """The results of all faults of one role."""

    num_harmed: int = 0
    num_lost: int = 0
    num_resumed: int = 0
    num_different: int = 0
    num_broken_sequences: int = 0
    pauses_s: list[float] = dataclasses.field(default_factory=list)
    noticed_s: list[float] = dataclasses.field(default_factory=list)
    back_s: list[float] = dataclasses.field(default_factory=list)

    def figures(self) -> dict[str, object]:
        """The figures as they are written; seconds to hundredths, percentiles by nearest rank."""
        return {
            "times": self.num_harmed,
            "streams": len(self.pauses_s),
            "streams_lost": self.num_lost,
            "streams_resumed_by_their_clients": self.num_resumed,
            "answers_different": self.num_different,
            "sequence_numbers_broken": self.num_broken_sequences,
            "pause_p50_s": at(self.pauses_s, 0.5),
            "pause_p99_s": at(self.pauses_s, 0.99),
            "not_serving_after_s_worst": at(self.noticed_s, 1.0),
            "serving_again_after_s_p50": at(self.back_s, 0.5),
            "serving_again_after_s_worst": at(self.back_s, 1.0),
        }


class Campaign:
    """Faults in one service under load, and their results."""

    def __init__(self, address: str, supervisor: psutil.Process, num_streams: int, num_tokens: int) -> None:
        self._address = address
        self._supervisor = supervisor
        self._specs = varied(num_streams, num_tokens)
        self._watch = HealthWatch(address)
        self._watch.start()
        self._undisturbed = stream_all(address, self._specs)
        self._back_at_s: dict[str, float] = {}

    def do(self, harm: Harm, role: str, phase: str, seed: int, outcome: FaultOutcome) -> None:
        """Makes a fault once under load; returns when the service serves again."""
        harmed_at = 0.0
        self._let_live(role)

        def now() -> None:
            nonlocal harmed_at
            victim = child(self._supervisor, role)
            harmed_at = time.monotonic()  # health may be asked for the moment that it is done
            harm(victim)

        answers = stream_all(self._address, self._specs, at_phase(phase, seed, now))
        noticed_s, back_s = self._watch.lost_and_found(harmed_at, BACK_WITHIN_S)
        self._back_at_s[role] = time.monotonic()
        outcome.num_harmed += 1
        outcome.noticed_s.append(noticed_s)
        outcome.back_s.append(back_s)
        for answer, expected in zip(answers, self._undisturbed, strict=True):
            outcome.num_lost += bool(answer.error)
            outcome.num_resumed += bool(answer.num_broken)
            outcome.num_different += not answer.error and answer.answer != expected.answer
            outcome.num_broken_sequences += answer.seqs != list(range(1, len(answer.seqs) + 1))
            outcome.pauses_s.append(answer.longest_gap_s)

    def start_s(self) -> float:
        """The engine's start time without load: from its death until a token went round the ring."""
        times = []
        for _ in range(NUM_STARTS):
            self._let_live("engine")
            killed_at = time.monotonic()
            child(self._supervisor, "engine").kill()
            times.append(self._watch.lost_and_found(killed_at, BACK_WITHIN_S)[1])
            self._back_at_s["engine"] = time.monotonic()
        return statistics.median(times)

    def saturate(self, seconds: float, num_tokens: int) -> dict[str, object]:
        """Overloads the service for a while: which processes were replaced, what was lost, and the reported health."""
        num_streams, prompt_length = SATURATED
        specs = varied(num_streams, num_tokens, prompt_length)
        before, num_changes = self._processes(), len(self._watch.changes)
        num_sent = num_lost = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            answers = stream_all(self._address, specs)
            num_sent += len(answers)
            num_lost += sum(bool(answer.error) for answer in answers)
        return {
            "streams": num_sent,
            "at_once": num_streams,
            "streams_lost": num_lost,
            "false_restarts": len(before - self._processes()),
            "times_not_serving": len(self._watch.changes) - num_changes,
        }

    def _processes(self) -> set[int]:
        return {one.pid for one in self._supervisor.children()}

    def _let_live(self, role: str) -> None:
        """Waits so long that the supervisor does not delay the next restart."""
        time.sleep(max(0.0, self._back_at_s.get(role, 0.0) + SOON_S - time.monotonic()))


def at(values: list[float], share: float) -> float:
    """Nearest rank, in seconds."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def run(
    campaign: Campaign, roles: list[str], what: str, harm: Harm, moments: list[tuple[str, int]]
) -> dict[str, object]:
    """Makes a fault in each of `roles` at every moment (phase, seed), in turn; returns the figures by role."""
    outcomes = {role: FaultOutcome() for role in roles}
    for number, ((phase, seed), role) in enumerate(itertools.product(moments, roles), start=1):
        campaign.do(harm, role, phase, seed, outcomes[role])
        lost, different = (
            sum(getattr(one, name) for one in outcomes.values()) for name in ("num_lost", "num_different")
        )
        print(f"{what} {number}/{len(moments) * len(roles)}: lost {lost}, different {different}", file=sys.stderr)
    return {role: outcome.figures() for role, outcome in outcomes.items() if outcome.num_harmed}


def main() -> None:
    """Measure, print, write the result."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="kills of each process in each of three phases")
    parser.add_argument("--hangs", type=int, default=5, help="times that each process is stopped for good")
    parser.add_argument("--saturated-s", type=float, default=60.0, help="seconds of more work than can be done")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES), help="whom to harm")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    with served() as (address, supervisor):
        campaign = Campaign(address, supervisor, options.streams, options.tokens)
        figures: dict[str, object] = {"engine_start_s": round(campaign.start_s(), 2)}
        kills = list(itertools.product(PHASES, range(options.seeds)))
        figures["killed"] = run(campaign, options.roles, "kill", psutil.Process.kill, kills)
        print(json.dumps(figures, indent=2), file=sys.stderr)
        hangs = [("decode", seed) for seed in range(options.hangs)]
        figures["hung"] = run(campaign, options.roles, "hang", psutil.Process.suspend, hangs)
        figures["saturated"] = campaign.saturate(options.saturated_s, options.tokens)
    command = f"python -m benchmarks.recovery --seeds {options.seeds} --hangs {options.hangs}"
    command += f" --saturated-s {options.saturated_s:g} --streams {options.streams} --tokens {options.tokens}"
    if options.roles == list(ROLES):
        write("recovery", command, figures)
    else:
        write("recovery_" + "_".join(options.roles), f"{command} --roles {' '.join(options.roles)}", figures)


if __name__ == "__main__":
    main()
