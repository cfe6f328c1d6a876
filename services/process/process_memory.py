"""Reads how much memory processes take, from Linux's /proc."""

import re
from collections.abc import Mapping
from pathlib import Path

PROC = Path("/proc")
PARENT = re.compile(r"^PPid:\s*(\d+)", re.MULTILINE)
PSS = re.compile(r"^Pss:\s*(\d+) kB", re.MULTILINE)  # pages that processes share count once, in parts


def ring_memory(supervisor: int, proc: Path = PROC) -> Mapping[str, int]:
    """Returns the bytes of memory of each process of a ring, by its id; what has ended or is hidden is left out."""
    found = {}
    for folder in proc.iterdir():
        try:
            if not folder.name.isdigit() or _number(PARENT, folder / "status") != supervisor:
                continue
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            found[title.removeprefix("sluice: ")] = _number(PSS, folder / "smaps_rollup") << 10
        except OSError:
            continue
    return found


def _number(pattern: re.Pattern[str], path: Path) -> int:
    match = pattern.search(path.read_text(errors="replace"))
    return int(match[1]) if match else 0
