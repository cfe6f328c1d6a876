"""The page of the edge: one file, no other origin. It asks the API that stands beside it, as any program would."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse

# Its own script and style are in the page; nothing else is loaded, and nobody may frame it or read its key elsewhere.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_TEXT = resources.files("sluice_server.services.edge").joinpath("page.html").read_text("utf-8")


async def page(request: Request) -> HTMLResponse:
    """GET /."""
    return HTMLResponse(_TEXT, headers=HEADERS)
