"""Keeps the results of a GPU benchmark, after each one, so that a stopped run goes on where it was.

Results of another GPU or of other versions do not count. An error is reported and tried again next time. Uses no
device.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import machine

Row = dict[str, object]


class Results:
    """The rows of NAME.json.

    Attributes:
        rows: figures by what they are of.
        errors: of this run, by the same.
        left: what there was no time for.
        folder: where they are kept.
    """

    def __init__(
        self, name: str, command: str, about: Row, *, is_fresh: bool = False, folder: Path | None = None
    ) -> None:
        """`folder`: where results are read and written; benchmarks/results if it is not given."""
        self.rows: dict[str, Row] = {}
        self.errors: dict[str, str] = {}
        self.left: list[str] = []
        self._name, self._command, self._about = name, command, about
        self.folder = folder or machine.RESULTS
        path = self.folder / f"{name}.json"
        if path.exists() and not is_fresh:
            found = json.loads(path.read_text())
            if all(found.get(key) == value for key, value in about.items()):
                self.rows = dict(found.get("rows", {}))

    def measure(self, todo: Sequence[tuple[str, Callable[[], Row]]], seconds: float = float("inf")) -> None:
        """Measures what has no row yet, in turn; begins nothing after that many seconds."""
        end = time.monotonic() + seconds
        for at, (key, call) in enumerate(todo, 1):
            if key in self.rows:
                continue
            begun = time.monotonic()
            if begun >= end:
                self.left.append(key)
                continue
            try:
                self.rows[key] = call()
            except Exception as error:  # of one kernel: it is reported, and the others are measured
                self.errors[key] = f"{type(error).__name__}: {error}"
            took = time.monotonic() - begun
            print(f"[{at}/{len(todo)}] {key}: {self._said(key)} ({took:.1f} s)", flush=True)
            machine.save(self._name, self._command, {**self._about, "rows": self.rows}, self.folder)

    def _said(self, key: str) -> str:
        if key in self.errors:
            return f"FAILED, {self.errors[key]}"
        shown = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in self.rows[key].items()}
        return ", ".join(f"{name} {value}" for name, value in shown.items())
