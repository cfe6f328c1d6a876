"""Describes the machine in every result, and writes results."""

import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, object]:
    """Processor, cores and versions."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    versions = {name: version_of(name) for name in ("torch", "grpcio", "tokenizers", "pyzmq")}
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **versions}


def version_of(package: str) -> str:
    """The version of an installed distribution, or "not installed", as where only an engine is measured."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def end_as_asked() -> None:
    """Makes SIGTERM raise SystemExit, so that what a run has started ends with it, as at Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def median(values: Sequence[float]) -> float:
    """Middle value."""
    return statistics.median(values)


def save(name: str, command: str, figures: dict[str, object], folder: Path | None = None) -> str:
    """Writes NAME.json, in benchmarks/results unless told otherwise, and returns its contents."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": command, "machine": machine(), **figures}, indent=2)
    (folder / f"{name}.json").write_text(text + "\n")
    return text


def write(name: str, command: str, figures: dict[str, object]) -> None:
    """Writes benchmarks/results/NAME.json and prints it."""
    print(save(name, command, figures))
