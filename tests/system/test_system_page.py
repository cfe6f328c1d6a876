"""The edge's page in a real browser: tokens appear as they come, a stop ends the generation, errors are shown."""

import os
from pathlib import Path

import pytest

from tests.system.browser import Page, browser, chromium
from tests.system.service import generate, serve, spec, wait_until
from tests.system.test_system_edge import edge

pytestmark = [pytest.mark.long, pytest.mark.skipif(chromium() is None, reason="chromium is not installed")]
PROMPT = "def add(a, b):\n"


def ask(page: Page, tokens: int) -> None:
    """Fill in the form and send it."""
    fields = {"prompt": PROMPT, "tokens": str(tokens), "temperature": "0"}
    for name, value in fields.items():
        page.run(f"void (document.getElementById({name!r}).value = {value!r})")
    page.run("document.getElementById('start').click()")


def shown(page: Page, name: str) -> str:
    return str(page.run(f"document.getElementById({name!r}).textContent"))


def test_a_page_streams_stops_and_says_what_went_wrong(tmp_path: Path) -> None:
    with serve("--model", "demo") as service, edge("--address", service.address) as url, browser() as page:
        page.open(url.removesuffix("/v1"))
        ask(page, 1900)
        wait_until(lambda: len(shown(page, "text")) > 200, 60, "no text appears")
        assert service.num_running() == 1 and "first token after" in shown(page, "figures")
        assert "tokens/s" in shown(page, "figures")
        page.run("document.getElementById('stop').click()")
        wait_until(lambda: "stopped" in shown(page, "figures"), 30, "it does not stop")
        wait_until(lambda: service.num_running() == 0, 30, "the engine works on for a page that stopped")
        with service.stub() as stub:
            wanted = spec(PROMPT, 1900)
            assert generate(stub, wanted).text.startswith(shown(page, "text")[:200])
        ask(page, 10**6)
        wait_until(lambda: shown(page, "error"), 30, "no error appears")
        assert "max_tokens" in shown(page, "error")
        picture = Path(os.environ.get("SLUICE_SCREENSHOTS", tmp_path)) / "page.png"
        ask(page, 24)
        wait_until(lambda: "done" in shown(page, "figures"), 60, "it does not end")
        page.screenshot(picture)
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
