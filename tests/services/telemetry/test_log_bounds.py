"""A fault that repeats does not fill the log: the first few of a kind per minute are written, others are counted."""

import io
import json
import logging

from sluice_server.engine.errors import ServiceError
from sluice_server.services.faults import fault
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.messages.processes import Role
from sluice_server.services.telemetry.logs import MAX_REPEATS, BoundedHandler, JsonFormatter, about

ENVELOPE = Envelope("0a", "g", traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")


class Log:
    """A process's log, and a clock that the test sets."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self._handler = BoundedHandler(self._stream)
        self._handler.setFormatter(JsonFormatter("tokenizer-0"))
        self._handler.addFilter(self._stamp)
        self.now_s = 1000.0

    def _stamp(self, record: logging.LogRecord) -> bool:
        record.created = self.now_s
        return True

    @property
    def lines(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]

    def __enter__(self) -> "Log":
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self._handler)


def break_down(error: type[Exception] = ValueError) -> ServiceError:
    """A stage's handling of an exception."""
    try:
        raise error("a bug")
    except Exception as raised:
        return fault(Role.TOKENIZER, about(ENVELOPE), "failed while encoding this request", raised)


def break_otherwise() -> None:
    try:
        raise KeyError("another bug")
    except KeyError as raised:
        fault(Role.TOKENIZER, about(ENVELOPE), "failed while encoding this request", raised)


def test_ten_thousand_of_a_kind_are_a_few_tracebacks_and_a_number() -> None:
    with Log() as log:
        told = [break_down() for _ in range(10_000)]
        assert len(log.lines) == MAX_REPEATS
        assert all("Traceback" in line["exception"] for line in log.lines)
        assert [("only counted" in line["message"]) for line in log.lines] == [False] * (MAX_REPEATS - 1) + [True]
        assert {one.message for one in told} == {told[0].message}  # each client is told all the same
        log.now_s += 61.0
        break_down()
        counted, again = log.lines[MAX_REPEATS:]
        assert counted["message"].startswith(f"{10_000 - MAX_REPEATS} more errors like those of ")
        assert "Traceback" in again["exception"]


def test_what_was_counted_is_told_though_the_fault_has_ended() -> None:
    with Log() as log:
        for _ in range(MAX_REPEATS + 3):
            break_down()
        log.now_s += 61.0
        logging.getLogger("any").warning("the next line of any kind")
        assert log.lines[MAX_REPEATS]["message"].startswith("3 more errors ")


def test_kinds_are_counted_apart_and_warnings_not_at_all() -> None:
    with Log() as log:
        for _ in range(20):
            break_down()
            logging.getLogger("any").warning("w")
        break_otherwise()
        messages = [line["message"] for line in log.lines]
        assert messages.count("w") == 20 and len(messages) == 20 + MAX_REPEATS + 1
        assert "another bug" in log.lines[-1]["exception"]


def test_others_that_write_the_same_line_get_it_unchanged() -> None:
    seen: list[str] = []

    class Other(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    other = Other()
    with Log():
        logging.getLogger().addHandler(other)
        try:
            for _ in range(MAX_REPEATS):
                break_down()
        finally:
            logging.getLogger().removeHandler(other)
    assert set(seen) == {"the tokenizer failed while encoding this request"}
