"""The files of `sluice run-batch`, in OpenAI's batch form: requests in, answers out, one JSON object a line.

The file of answers is also the record of what was asked: a request whose custom_id stands in it is not asked again.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from sluice_server.engine.errors import Code, ServiceError

ID_PREFIX = "batch_req_"
BEGINNING = f'{{"id":"{ID_PREFIX}'.encode()  # of every line of answers
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BadLineError(Exception):
    """A line that is no request; the message says why."""


class _Known(msgspec.Struct):
    """What a line of the output must have; `line` is the number of a line of the input that is no request."""

    custom_id: str | None
    response: dict[str, Any] | None
    line: int | None = None


def read(line: bytes) -> BatchRequest:
    """Returns the request of a line. Raises BadLineError."""
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLineError(str(error)) from None
    if not request.custom_id:
        raise BadLineError("custom_id is empty")
    if request.method != "POST":
        raise BadLineError(f"method: {request.method!r} is not POST")
    if request.url not in URLS:
        raise BadLineError(f"url: {request.url!r} is not served in a batch; {', '.join(URLS)} are")
    if request.body.get("stream"):
        raise BadLineError("body.stream: a batch has whole answers: leave it out")
    return request


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the text of each line that is not empty. Raises ServiceError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise _unusable(f"INPUT: cannot read {path}: {error.strerror}") from None


class AnswerFile:
    """The file of answers, held by one run at a time. A run can be broken off anywhere."""

    def __init__(self, path: Path) -> None:
        """Open the file and read what stands in it. Raises ServiceError for one that cannot be used."""
        self.known: set[str] = set()
        self.bad_lines: set[int] = set()
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise _unusable(f"OUTPUT: cannot write to {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(path)
        except OSError as error:
            self._file.close()
            raise _unusable(f"OUTPUT: {path} is in use by another run ({error.strerror})") from None
        except ServiceError:
            self._file.close()
            raise

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def answered(self, custom_id: str, status: int, request_id: str, body: object) -> None:
        """Write the answer of a request, a refusal too."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._write({"id": _batch_id(request_id), "custom_id": custom_id, "response": response, "error": None})

    def refused(self, line: int, message: str) -> None:
        """Write the error of a line that is no request."""
        error = {"code": "invalid_request", "message": f"line {line}: {message}"}
        self._write(
            {"id": _batch_id(f"line-{line}"), "custom_id": None, "response": None, "error": error, "line": line}
        )

    def _write(self, value: dict[str, object]) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")
        self._file.flush()

    def _read(self, path: Path) -> None:
        """Note what was asked, and cut off a last line that a broken run left unfinished."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and line.startswith(BEGINNING[: len(line)]):
                self._file.truncate(end)
                break
            end += len(line)
            try:
                one = msgspec.json.decode(line, type=_Known)
            except msgspec.DecodeError:
                raise _unusable(f"OUTPUT: line {number} of {path} is no answer of a batch; give another file") from None
            if one.custom_id is not None:
                self.known.add(one.custom_id)
            elif one.line is not None:
                self.bad_lines.add(one.line)
        self._file.seek(0, os.SEEK_END)


def _unusable(message: str) -> ServiceError:
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", message)


def _batch_id(name: str) -> str:
    return f"{ID_PREFIX}{name}"
