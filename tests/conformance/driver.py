"""Runs the driver of an SDK: a request in, lines out, as README.md describes."""

import contextlib
import json
import selectors
import subprocess
from collections.abc import Iterator
from typing import Any

from tests.conformance.sdks import Sdk

LINE_TIMEOUT_S = 60.0


class Driver:
    """A driver process that has received its request."""

    def __init__(self, process: "subprocess.Popen[str]", asked: dict[str, Any]) -> None:
        self._process = process
        self._num_ends = asked.get("count", 1)
        self.ends: list[dict[str, Any]] = []
        self._say(json.dumps(asked))

    def paused(self) -> str:
        """Waits until the driver pauses, and returns the id of its generation."""
        line = self._line()
        assert "paused" in line, line
        return str(line["paused"]["generation_id"])

    def go_on(self) -> None:
        """Lets the driver read on."""
        self._say("")

    def all_ends(self) -> list[dict[str, Any]]:
        """Waits for the ends of all generations, and for the end of the driver."""
        while len(self.ends) < self._num_ends:
            self.ends.append(self._line()["end"])
        assert self._process.wait(LINE_TIMEOUT_S) == 0
        return self.ends

    def end(self) -> dict[str, Any]:
        """The end of the driver's only generation."""
        (end,) = self.all_ends()
        return end

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(LINE_TIMEOUT_S), "the driver says nothing"
        line = self._process.stdout.readline()
        assert line, f"the driver ended with {self._process.wait()} and no end"
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


@contextlib.contextmanager
def asking(sdk: Sdk, address: str, *options: str, **asked: Any) -> Iterator[Driver]:  # noqa: ANN401 # fields of JSON
    """Runs a driver with one request."""
    command = [*sdk.driver, "--address", address, *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        yield Driver(process, asked)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def told(sdk: Sdk, address: str, *options: str, **asked: Any) -> dict[str, Any]:  # noqa: ANN401 # as above
    """Runs a driver with one request and returns how the request ended."""
    with asking(sdk, address, *options, **asked) as driver:
        return driver.end()
