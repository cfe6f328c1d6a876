"""Logging of one process to stderr: plain lines for operators, or JSON.

A line about a request carries the ids of the request and of its trace. Prompts are logged only if that is enabled.
"""

import copy
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TextIO

import msgspec

from sluice_server.services.messages.messages import Envelope

_encode = msgspec.json.Encoder(enc_hook=str).encode
FIELDS = "about"  # attribute of a log record with its named fields
MAX_NAMED = 32  # requests of a stream that are named in one line
MAX_REPEATS = 5  # errors of one kind that are written per minute
MINUTE_S = 60.0


def about(envelope: Envelope, **more: object) -> dict[str, Mapping[str, object]]:
    """Returns `extra` for a log line about a request."""
    return about_trace(envelope.traceparent, request_id=envelope.request_id, **more)


def about_trace(traceparent: str, **more: object) -> dict[str, Mapping[str, object]]:
    """Returns `extra` for a log line that has no request (yet); `traceparent` is a W3C header, or ""."""
    return {FIELDS: {**trace_of(traceparent), **more}}


def about_stream(traceparent: str, envelopes: Iterable[Envelope]) -> dict[str, Mapping[str, object]]:
    """Returns `extra` for a log line about a stream of many requests, each with its own trace. Names the first
    `MAX_NAMED`."""
    requests = [{"request_id": one.request_id, **trace_of(one.traceparent)} for one in islice(envelopes, MAX_NAMED)]
    return about_trace(traceparent, requests=requests)


def trace_of(traceparent: str) -> dict[str, object]:
    """Returns the field of a line that names its trace; none without one."""
    parts = traceparent.split("-")
    return {"trace_id": parts[1]} if len(parts) == 4 else {}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line."""

    def __init__(self, process_id: str) -> None:
        super().__init__()
        self._process_id = process_id
        self._second = 0, ""  # the latest one, and its text

    def format(self, record: logging.LogRecord) -> str:
        """Returns time, level, process, logger, message, the record's fields, and the exception if there is one."""
        if self._second[0] != int(record.created):
            self._second = int(record.created), self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z")
        fields = {
            "time": self._second[1],
            "level": record.levelname.lower(),
            "process": self._process_id,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _encoded(fields)


class ConsoleFormatter(logging.Formatter):
    """Formats a record as a plain line."""

    def __init__(self, process_id: str) -> None:
        super().__init__(f"%(asctime)s {process_id} %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the base class's name
        """Append the record's fields to the message."""
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


@dataclasses.dataclass(slots=True)
class _Minute:
    """The counts of one kind of error within one minute."""

    since_s: float
    num_written: int = 0
    num_counted: int = 0  # counted but not written


_Kind = tuple[str, int, str, int]


class BoundedHandler(logging.StreamHandler[TextIO]):
    """Writes log lines, and limits repeated errors. Errors are of one kind if the same line of code logged them and
    the same line raised them. The first `MAX_REPEATS` of a kind in a minute are written, further ones are counted.
    Their number is written with the first line of any kind after that minute."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._minutes: dict[_Kind, _Minute] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write or count a record."""
        if self._minutes:
            self._tell_counted(record)
        if record.levelno < logging.ERROR:
            super().emit(record)
            return
        minute = self._minutes.setdefault(_kind(record), _Minute(record.created))
        if minute.num_written >= MAX_REPEATS:
            minute.num_counted += 1
            return
        minute.num_written += 1
        if minute.num_written == MAX_REPEATS:
            record = _with(record, f" (the {MAX_REPEATS}th of its kind in a minute: further ones are only counted)")
        super().emit(record)

    def _tell_counted(self, now: logging.LogRecord) -> None:
        """Close the minutes that are over, and write the number of counted errors."""
        over = [kind for kind, minute in self._minutes.items() if now.created - minute.since_s >= MINUTE_S]
        for kind in over:
            minute = self._minutes.pop(kind)
            if minute.num_counted:
                since = time.strftime("%H:%M:%S", time.localtime(minute.since_s))
                text = f"{minute.num_counted} more errors like those of {kind[0]}:{kind[1]} since {since} were counted"
                super().emit(
                    logging.makeLogRecord(
                        {
                            "name": __name__,
                            "levelno": logging.ERROR,
                            "levelname": "ERROR",
                            "msg": text,
                            "created": now.created,
                            "msecs": now.msecs,
                        }
                    )
                )


def _kind(record: logging.LogRecord) -> _Kind:
    """Returns the line of code that logged the record, and the line that raised its exception."""
    trace = record.exc_info[2] if record.exc_info else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised = ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return (record.pathname, record.lineno, *raised)


def _with(record: logging.LogRecord, more: str) -> logging.LogRecord:
    """Returns a copy of the record with more text; other handlers may write the original."""
    longer = copy.copy(record)
    longer.msg, longer.args = record.getMessage() + more, None
    return longer


def configure(level: str, form: str, process_id: str) -> None:
    """Set up the root logger: `form` is console or json."""
    handler = BoundedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process_id) if form == "json" else ConsoleFormatter(process_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # No line has these, and each is asked for with each record: the process's id by a call of the system.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # The SDK logs every failed batch; `queue` counts failed spans and logs once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    root.setLevel(level.upper())


def _encoded(fields: Mapping[str, object]) -> str:
    try:
        return _encode(fields).decode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in a file's name that is no UTF-8
        return json.dumps(fields, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    found = vars(record).get(FIELDS)
    return found if isinstance(found, Mapping) else {}


def _shown(value: object) -> str:
    """Returns the value as text without line breaks, whatever a client sent."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and not value.isalnum() else str(value)
