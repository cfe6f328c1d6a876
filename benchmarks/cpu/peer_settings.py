"""Finds the settings with which vLLM's server is at its best on this machine: one is changed at a time, and kept if
more tokens a second come out.

    python -m benchmarks.cpu.peer_settings [--shape 61M] [--requests 96] [--streams 16]

Each candidate is a server of its own, with tcmalloc before its allocator where there is one. What is found is written
to benchmarks/results, where the comparisons read it. What has been measured is kept beside the checkpoints: a search
that was stopped goes on where it was, --fresh begins again.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.cpu.servers import Figures, Server, start_vllm
from benchmarks.cpu.shapes import CACHE, SHAPES
from benchmarks.machine import RESULTS, end_as_asked, write


@dataclasses.dataclass(frozen=True, slots=True)
class PeerSettings:
    """What a server is started with."""

    form: str = "float32"
    threads: int = 2
    stream_interval: int = 1
    block_size: int = 128

    def options(self) -> tuple[str, ...]:
        """The command line's part."""
        return ("--stream-interval", str(self.stream_interval), "--block-size", str(self.block_size))


CHANGES: tuple[dict[str, str | int], ...] = (
    {"stream_interval": 8},
    {"threads": 1},
    {"block_size": 32},
    {"form": "bfloat16"},
)


def start(shape: str, settings: PeerSettings, log: Path, more: Sequence[str] = ()) -> Server | None:
    """A server with these settings and further options; None if vLLM is not installed."""
    return start_vllm(shape, settings.form, settings.threads, log, (*settings.options(), *more))


def start_best(shape: str, log: Path, more: Sequence[str] = ()) -> Server | None:
    """The one that was found, or the first candidate where none was looked for, with further options."""
    return start(shape, best_of(settings_path(shape)), log, more)


def settings_path(shape: str) -> Path:
    """Where they are kept."""
    return RESULTS / f"{_name(shape)}.json"


def best_of(path: Path) -> PeerSettings:
    """What a search has found."""
    return PeerSettings(**json.loads(path.read_text())["best"]) if path.exists() else PeerSettings()


def search(measure: Callable[[PeerSettings], Figures | None]) -> Iterator[tuple[PeerSettings, Figures]]:
    """What was tried, and its figures; the best is the one with the most tokens a second. `measure` gives None where
    there is nothing to measure."""
    best, rate = PeerSettings(), 0.0
    for change in ({}, *CHANGES):
        tried = dataclasses.replace(best, **change)  # type: ignore[arg-type] # mixed values
        figures = measure(tried)
        if figures is None:
            return
        if figures["tokens_per_s"] > rate:
            best, rate = tried, figures["tokens_per_s"]
        yield tried, figures


def measured(options: argparse.Namespace, kept: Path, settings: PeerSettings) -> Figures | None:
    """The figures of a server with these settings, kept or new."""
    found: dict[PeerSettings, Figures] = {}
    for line in kept.read_text().splitlines() if kept.exists() else ():
        about, figures = json.loads(line)
        found[PeerSettings(**about)] = figures
    if settings in found:
        return found[settings]
    server = start(options.shape, settings, CACHE / "peer_settings.log")
    if server is None:
        return None
    try:
        server.measure(options.streams, options.streams, 1)
        figures = server.measure(options.streams, options.requests, 2)
    finally:
        server.stop()
    with kept.open("a") as file:
        file.write(json.dumps([dataclasses.asdict(settings), figures]) + "\n")
    print(f"{server.name}: {figures}", flush=True)
    return figures


def _name(shape: str) -> str:
    return f"cpu_peer_settings_{shape}"


def main() -> None:
    """Search and write."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="61M", choices=tuple(SHAPES))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    kept = CACHE / f"{_name(options.shape)}.jsonl"
    if options.fresh:
        kept.unlink(missing_ok=True)
    tried = list(search(partial(measured, options, kept)))
    if not tried:
        return
    best = max(tried, key=lambda one: one[1]["tokens_per_s"])[0]
    rows = [{**dataclasses.asdict(settings), **figures} for settings, figures in tried]
    line = f"python -m benchmarks.cpu.peer_settings --shape {options.shape} --streams {options.streams}"
    line += f" --requests {options.requests}"
    write(_name(options.shape), line, {"best": dataclasses.asdict(best), "tried": rows})


if __name__ == "__main__":
    main()
