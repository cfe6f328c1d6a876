"""Spans form a tree."""

from sluice_server.services.telemetry.collector import ReceivedSpan
from sluice_server.services.telemetry.tree import tree_lines


def span(name: str, span_id: str, parent: str, start_ms: int, end_ms: int) -> ReceivedSpan:
    return ReceivedSpan(name, "t", span_id, parent, start_ms * 10**6, end_ms * 10**6, "p-0", False, {})


def test_children_hang_under_their_parents_in_order() -> None:
    spans = [
        span("b", "3", "1", 5, 9),
        span("a", "2", "1", 1, 4),
        span("c", "4", "2", 2, 3),
        span("root", "1", "x", 0, 10),
    ]
    assert tree_lines(spans) == [
        "root  10.00 ms  [p-0]",
        "├─ a  3.00 ms  [p-0]",
        "│  └─ c  1.00 ms  [p-0]",
        "└─ b  4.00 ms  [p-0]",
    ]
