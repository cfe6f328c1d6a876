"""vLLM over ranks of one core each, or as many threads, for `benchmarks.ranks`: stopped while others are measured.

Its ranks look for work without pause, so that each turn lets its processes go on, and stops them behind it.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cpu.decode import PEERS, VENVS, Contestant

FORMS = ("float32", "bfloat16")  # which it has on a CPU


class RankPeer:
    """A peer's engine, which answers what `benchmarks.ranks.Load` does."""

    def __init__(self, contestant: Contestant, part: int, tokens: int, prompt: int) -> None:
        """Rates are of `part` steps of `tokens`, or of a prompt of so many ids."""
        self._contestant = contestant
        self._part, self._tokens, self._prompt = part, tokens, prompt

    def decode(self, rows: int) -> list[float]:
        """Returns the tokens a second of so many sequences: one rate for every part of the steps."""
        with self._running():
            took = self._contestant.ask("decode", batch=rows, steps=self._tokens)
        parts = [took[at : at + self._part] for at in range(0, self._tokens, self._part)]
        return [rows * len(part) / sum(part) for part in parts]

    def prompt(self) -> float:
        """Returns the tokens a second of one long prompt."""
        with self._running():
            return self._prompt / sum(self._contestant.ask("prefill", batch=1, steps=0))

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def wait(self) -> None:
        """Waits until it can be asked. Raises ChildProcessError if it ended."""
        self._contestant.answer()

    def signal(self, number: int) -> None:
        """Signals all processes of the peer, whose own session they are."""
        os.killpg(self._contestant.process.pid, number)


def _is_ready(peer: RankPeer, log: Path) -> bool:
    """Waits for the peer's first answer, and stops it until its first turn; says why where there is none."""
    try:
        peer.wait()
    except ChildProcessError as error:
        print(f"{error}; see {log}", flush=True)
        return False
    peer.signal(signal.SIGSTOP)
    return True


@contextlib.contextmanager
def opened(directory: Path, form: str, ranks: int, log: Path, sizes: tuple[int, int, int]) -> Iterator[RankPeer | None]:
    """A peer that is ready, with `ranks` of one thread, or one of two for 1; None, and why, where it cannot be.

    `sizes` are those of `RankPeer`. Its processes are ended behind it.
    """
    python = VENVS / "vllm" / "bin" / "python"
    if not python.exists() or form not in FORMS:
        why = f"has no {form}" if python.exists() else f"is not installed in {VENVS}"
        print(f"vLLM {why}: it is left out", flush=True)
        yield None
        return
    environment = {**os.environ, "BENCH_THREADS": "2", "BENCH_RANKS": str(ranks)}
    environment.pop("PYTHONPATH", None)
    command = [str(python), str(PEERS / "vllm_worker.py"), str(directory), form]
    with (
        log.open("a") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        contestant = Contestant(f"vLLM over {ranks}", process)
        peer = RankPeer(contestant, *sizes)
        try:
            yield peer if _is_ready(peer, log) else None
        finally:
            with contextlib.suppress(ProcessLookupError):
                peer.signal(signal.SIGKILL)
