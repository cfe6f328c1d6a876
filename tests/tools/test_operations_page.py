"""The operations page: every error reason of the service, and every option that it names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools.check_links import ROOT

PAGE = (ROOT / "docs/operations.md").read_text()
OPTIONS = (ROOT / "docs/reference/options.md").read_text()
# Families of reasons that the page describes together; INTERNAL ones are one row.
FAMILIES = {"INVALID_SETTING", "LISTEN_FAILED", "DUPLICATE_ID"}


def errors(path: Path) -> Iterator[tuple[str, str]]:
    """Reason and code of each `ServiceError(...)` of a file, where both are literals."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ServiceError" and len(node.args) > 1):
            continue
        code, reason = node.args[:2]
        if isinstance(reason, ast.Constant) and isinstance(reason.value, str) and isinstance(code, ast.Attribute):
            yield reason.value, code.attr


def test_every_reason_is_explained_with_its_code() -> None:
    files = [path for room in ("engine", "services") for path in (ROOT / room).rglob("*.py")]
    found = {error for path in files for error in errors(path) if error[0] not in FAMILIES}
    assert {"QUEUE_FULL", "STAGE_LOST", "SLOW_CONSUMER"} <= {reason for reason, _ in found}
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    at_start = {"MODEL_INVALID", "MODEL_CHANGED", "NO_RUN_DIRECTORY"}  # told in a line, not in a status
    unexplained = [
        (reason, code)
        for reason, code in sorted(found)
        if not any(f"`{reason}`" in row and (reason in at_start or f"| {code} |" in row) for row in rows)
    ]
    assert unexplained == []


def test_every_option_that_it_names_is_one() -> None:
    named = set(re.findall(r"`(?:sluice [a-z]+ )?(--[a-z-]+)", PAGE))
    others = {"--profile", "--scale", "--concurrency", "--sweep"}  # of docker compose; of other commands
    assert len(named) > 30
    assert sorted(one for one in named - others if f"`{one}`" not in OPTIONS) == []


def warnings(path: Path) -> Iterator[str]:
    """The format of each line that a file logs at warning or above, where it is a literal."""
    levels = {"warning", "error", "critical", "exception"}
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    for call in calls:
        by = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in levels else None
        if getattr(by, "id", "") in ("logger", "log") and isinstance(call.args[0], ast.Constant):
            yield str(call.args[0].value)


def test_every_warning_of_the_log_is_explained() -> None:
    """Found by its longest piece without a value."""
    files = [path for room in ("engine", "services") for path in (ROOT / room).rglob("*.py")]
    pieces = {max(re.split(r"%[sd.]", line), key=len).strip(" ;:()") for path in files for line in warnings(path)}
    assert len(pieces) > 15
    assert sorted(piece for piece in pieces if len(piece) > 6 and piece not in PAGE) == []
