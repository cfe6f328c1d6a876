"""Logging of one process: lines for people or JSON for machines, to stderr. A line about a request carries its id and
its trace's; prompts are never logged unless asked for."""

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from itertools import islice

from services.messages import Envelope

FIELDS = "about"  # of a log record: what it is about, by name
MAX_NAMED = 32  # requests of a stream in one line


def about(envelope: Envelope, **more: object) -> dict[str, Mapping[str, object]]:
    """`extra` of a line about a request."""
    return about_trace(envelope.traceparent, request_id=envelope.request_id, **more)


def about_trace(traceparent: str, **more: object) -> dict[str, Mapping[str, object]]:
    """`extra` of a line about what has no request (yet), under a W3C header, or ""."""
    return {FIELDS: {**_trace(traceparent), **more}}


def about_stream(traceparent: str, envelopes: Iterable[Envelope]) -> dict[str, Mapping[str, object]]:
    """`extra` of a line about a stream of many requests, each in a trace of its own: the first ones are named."""
    requests = [{"request_id": one.request_id, **_trace(one.traceparent)} for one in islice(envelopes, MAX_NAMED)]
    return about_trace(traceparent, requests=requests)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process_id: str) -> None:
        super().__init__()
        self._process_id = process_id

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, process, logger, message, what it is about, and the exception if there is one."""
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "process": self._process_id,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class ConsoleFormatter(logging.Formatter):
    """A line for people."""

    def __init__(self, process_id: str) -> None:
        super().__init__(f"%(asctime)s {process_id} %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # the base class's name
        """What it is about behind the message."""
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


def configure(level: str, form: str, process_id: str) -> None:
    """Set up the root logger: `form` is console or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process_id) if form == "json" else ConsoleFormatter(process_id))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # It tells of each batch that fails; here spans that do not arrive are counted, and told of once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    root.setLevel(level.upper())


def _trace(traceparent: str) -> dict[str, str]:
    parts = traceparent.split("-")
    return {"trace_id": parts[1]} if len(parts) == 4 else {}


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    found = vars(record).get(FIELDS)
    return found if isinstance(found, Mapping) else {}


def _shown(value: object) -> str:
    """Without line breaks, whatever a client sent."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and not value.isalnum() else str(value)
