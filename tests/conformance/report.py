"""Runs the suite for every SDK and writes the table of results into docs/adding-a-client.md:
`python -m tests.conformance.report`.

A row is a case. A cell is yes, NO, or - where the SDK could not be built; the reasons stand below the table.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from tests.conformance.sdks import SDKS

FOLDER = Path(__file__).parent
SUITE = "test_conformance"  # what else is there is about packages
PAGE = FOLDER.parents[1] / "docs/adding-a-client.md"
PLACE = re.compile(r"(<!-- written by `make conformance` -->\n).*?(<!-- end of what it wrote -->\n)", re.DOTALL)
Cells = dict[tuple[str, str], str]  # (case, SDK) → yes, NO or -


def main() -> int:
    """Run, write, and give pytest's own status."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        options = ("--timeout", "600", "-rs", f"--junitxml={found}", "-o", "junit_family=xunit2")
        done = subprocess.run([sys.executable, "-m", "pytest", str(FOLDER), *options], check=False)
        cells, reasons = read(ElementTree.parse(found).iter("testcase"))
    PAGE.write_text(placed(PAGE.read_text(), table(cells, reasons)))
    print(table(cells, reasons))
    return done.returncode


def placed(page: str, found: str) -> str:
    """The page with the table in its place. Raises ValueError if the page has no markers for it."""
    written, num = PLACE.subn(lambda match: f"{match[1]}{found}{match[2]}", page)
    if num != 1:
        raise ValueError(f"{num} places for the table of the suite; there must be one")
    return written


def read(cases: Iterable[ElementTree.Element]) -> tuple[Cells, dict[str, str]]:
    """The table's cells, and why SDKs were left out. A case of several calls holds if all of them do."""
    cells: Cells = {}
    reasons: dict[str, str] = {}
    names = "|".join(sorted((sdk.name for sdk in SDKS), key=len, reverse=True))
    for case in cases:
        match = re.fullmatch(rf"test_(\w+)\[({names})(?:-\w+)?\]", case.get("name", ""))
        if match is None or not case.get("classname", "").endswith(SUITE):
            continue
        name, sdk = match[1].replace("_", " "), match[2]
        skipped = case.find("skipped")
        if skipped is not None:
            reasons[sdk] = skipped.get("message", "")
        held = "-" if skipped is not None else "NO" if len(case.findall("*")) else "yes"
        before = cells.get((name, sdk))
        cells[name, sdk] = held if before in (None, "yes") else before or held
    return cells, reasons


def table(cells: Cells, reasons: dict[str, str]) -> str:
    """The table in Markdown."""
    sdks = [sdk.name for sdk in SDKS]
    cases = list(dict.fromkeys(case for case, _ in cells))
    rows = [["case", *sdks], ["---"] * (len(sdks) + 1)]
    rows += [[case, *(cells.get((case, sdk), "-") for sdk in sdks)] for case in cases]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", *(f"{sdk}: {reason}." for sdk, reason in reasons.items())]
    return "\n" + "\n".join(lines).rstrip() + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
