"""The web page: a single file, which calls the HTTP API of its own origin."""

from importlib import resources

from starlette.requests import Request
from starlette.responses import HTMLResponse

# Script and style are inline and nothing else is loaded. Other sites cannot frame the page or read its key.
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_PAGE = resources.files("sluice_server.services.edge").joinpath("page.html").read_text("utf-8")


async def page(request: Request) -> HTMLResponse:
    """GET /: the web page."""
    return HTMLResponse(_PAGE, headers=PAGE_HEADERS)
