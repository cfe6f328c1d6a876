"""The edge's page in a real browser: tokens appear as they come, a stop ends the generation, errors are shown."""

import base64
import os
from pathlib import Path

import pytest

from tests.oracle.vision_checkpoints import make_served_llava
from tests.system.browser import Page, browser, chromium
from tests.system.service import generate, serve, spec, wait_until
from tests.system.test_system_edge import edge
from tests.system.test_system_images import picture

pytestmark = [pytest.mark.long, pytest.mark.skipif(chromium() is None, reason="chromium is not installed")]
PROMPT = "def add(a, b):\n"


def ask(page: Page, tokens: int) -> None:
    """Fill in the form and send it."""
    fields = {"prompt": PROMPT, "tokens": str(tokens), "temperature": "0"}
    for name, value in fields.items():
        page.run(f"void (document.getElementById({name!r}).value = {value!r})")
    page.run("document.getElementById('start').click()")


DROP = """(() => {
  const bytes = Uint8Array.from(atob("%s"), (one) => one.charCodeAt(0));
  const dropped = new DataTransfer();
  dropped.items.add(new File([bytes], "a.png", { type: "image/png" }));
  dropped.items.add(new File(["a"], "a.txt", { type: "text/plain" }));
  document.dispatchEvent(new DragEvent("drop", { dataTransfer: dropped, bubbles: true, cancelable: true }));
})()"""


def test_a_page_takes_a_picture_by_drop(tmp_path: Path) -> None:
    make_served_llava(tmp_path)
    with serve("--model", str(tmp_path), "--http", "127.0.0.1:0") as service, browser() as page:
        page.open(service.http)
        page.run(DROP % base64.b64encode(picture(1)).decode())
        seen = "document.getElementById('images').children[0]?.naturalWidth"
        wait_until(lambda: page.run(seen) == 60, 30, "the picture is not shown")
        assert shown(page, "error") == "a.txt is no picture" and page.run("document.getElementById('chat').checked")
        ask(page, 8)
        wait_until(lambda: "done" in shown(page, "figures"), 60, f"it does not end: {shown(page, 'error')}")
        assert shown(page, "text") and not shown(page, "error")
        page.run("document.getElementById('images').children[0].click()")
        assert page.run("document.getElementById('images').children.length") == 0


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
