"""Keeps the results of a benchmark part by part in a file, so that a stopped run can go on."""

import json
from collections.abc import Mapping
from pathlib import Path


class SavedResults:
    """Results so far with the same options, in a file that is replaced as a whole."""

    def __init__(self, path: Path, options: dict[str, int], *, is_fresh: bool) -> None:
        self._path = path
        self._options = options
        found = json.loads(path.read_text()) if path.exists() and not is_fresh else {}
        self.parts: dict[str, object] = found["parts"] if found.get("options") == options else {}

    def add(self, name: str, figures: object) -> None:
        """Adds the figures of one part."""
        self.parts[name] = json.loads(json.dumps(figures))
        self._path.parent.mkdir(exist_ok=True)
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps({"options": self._options, "parts": self.parts}, indent=2))
        beside.replace(self._path)


def figures_of(parts: Mapping[str, object]) -> dict[str, object]:
    """The figures in groups: a part named a/b becomes b of a."""
    figures: dict[str, object] = {}
    for name, found in parts.items():
        group, _, member = name.partition("/")
        if member:
            inner = figures.setdefault(group, {})
            assert isinstance(inner, dict)
            inner[member] = found
        else:
            figures[group] = found
    return figures
