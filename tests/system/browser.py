"""A real headless Chromium, driven over its debugging pipe without a driver or a library."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.system.service import wait_until


class Page:
    """One page of the browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = os.fdopen(reading, "rb", buffering=0)
        self._writing = os.fdopen(writing, "wb", buffering=0)
        self._rest = b""
        self._number = 0
        self._session = ""

    def open(self, url: str) -> None:
        """Go to `url` and wait until it is there."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Page.navigate", url=url)
        wait_until(lambda: self.run("document.readyState") == "complete", 30, "the page does not load")

    def run(self, script: str) -> Any:  # noqa: ANN401 # of JSON
        """The value of an expression in the page; promises are awaited."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """A PNG of the page."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Closes the pipe, at which the browser ends."""
        self._writing.close()
        self._reading.close()

    def _ask(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._writing.write(json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told
                result = told["result"]
                assert isinstance(result, dict)
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = self._reading.read(65536)
            assert data, "the browser has gone"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


def chromium() -> str | None:
    """The path of Chromium; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A page of a browser with a profile of its own."""
    from_us, to_us = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            "--headless=new --no-sandbox --window-size=900,700 --disable-gpu --no-first-run --remote-debugging-pipe"
        )
        command = f"exec {chromium()} {options} --user-data-dir={profile} 3<&{from_us[0]} 4>&{to_us[1]}"
        process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(from_us[0], to_us[1]),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(from_us[0])
        os.close(to_us[1])
        page = Page(to_us[0], from_us[1])
        try:
            yield page
        finally:
            page.close()
            process.kill()
            process.wait()
