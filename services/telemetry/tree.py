"""Formats the spans of one trace as lines of a tree, with durations and the process of each span. Pure."""

from collections.abc import Sequence

from sluice_server.services.telemetry.collector import ReceivedSpan


def tree_lines(spans: Sequence[ReceivedSpan]) -> list[str]:
    """Returns the lines: roots first (spans whose parent is not among `spans`), children in order of their start."""
    known = {span.span_id for span in spans}
    children: dict[str, list[ReceivedSpan]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    lines: list[str] = []

    def walk(span: ReceivedSpan, indent: str, branch: str) -> None:
        took_ms = (span.end_ns - span.start_ns) / 1e6
        lines.append(f"{indent}{branch}{span.name}  {took_ms:.2f} ms  [{span.process}]")
        below = children.get(span.span_id, [])
        deeper = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        for i, child in enumerate(below):
            walk(child, deeper, "└─ " if i == len(below) - 1 else "├─ ")

    for root in children.get("", []):
        walk(root, "", "")
    return lines
