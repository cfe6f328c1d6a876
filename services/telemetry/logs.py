"""Logging of one process: lines for people or JSON for machines, to stderr. Prompts are never logged."""

import json
import logging
import sys


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process_id: str) -> None:
        super().__init__()
        self._process_id = process_id

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, process, logger, message, and the exception if there is one."""
        fields = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "process": self._process_id,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure(level: str, form: str, process_id: str) -> None:
    """Set up the root logger: `form` is console or json."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter(process_id))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {process_id} %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
