"""What goes round every exchange of request and answer: its id, the check of its Host, log line and metrics."""

import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice_server.services.edge.errors import EdgeError, bad_request
from sluice_server.services.edge.observed import HttpObserver
from sluice_server.services.edge.responses import refusal
from sluice_server.services.edge.settings import HttpSettings

logger = logging.getLogger(__name__)

ID = "x-request-id"
_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII without blanks
LEFT = 499  # as nginx counts a client that left before its answer began
OTHER = "other"  # the route of a path that is not in the table
ABOUT = "about"  # attribute of a log record with its named fields


class Exchange:
    """The application with this round it. `routes` gives the path of the table that a handler answers."""

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpSettings,
        observer: HttpObserver,
        routes: Mapping[object, str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app = app
        self._settings = settings
        self._observer = observer
        self._routes = routes
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", "the server takes nothing else"
        scope["root_path"] = self._settings.root_path
        start_s, headers = self._clock(), Headers(scope=scope)
        given = headers.get(ID, "")
        name, refused = _name(given), self._refused(given, headers)
        status = LEFT

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID] = name
            await send(message)

        self._observer.began()
        try:
            await (self._app if refused is None else refusal(refused))(scope, receive, answer)
        finally:
            seconds = self._clock() - start_s
            route = self._routes.get(scope.get("endpoint"), OTHER)
            self._observer.ended(route, _method(scope), status, seconds)
            if self._settings.access_log:
                _log(scope, status, seconds, name)

    def _refused(self, given: str, headers: Headers) -> EdgeError | None:
        if given and not _ID.fullmatch(given):
            return bad_request(ID, "is not 1 to 128 printable ASCII characters without blanks")
        host = headers.get("host")
        if host is None or is_allowed(host, self._settings.allowed_hosts):  # only HTTP/1.0 may have none; no browser
            return None
        text = f"host: {host[:80]!r} is not a name of this server; --allowed-hosts lists them"
        return EdgeError(421, "invalid_request_error", text, param="host", code="misdirected_request")


def is_allowed(host: str, names: tuple[str, ...]) -> bool:
    """Whether the Host header is a name that is listed, localhost, or an address: no other site's name can lead a
    browser to these."""
    if "*" in names:
        return True
    name = host.lower().rpartition(":")[0] if re.search(r":\d*$", host) else host.lower()
    name = name.rstrip(".")
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        found = ("localhost", "*.localhost", *names)
        return name in found or any(one.startswith("*.") and name.endswith(one[1:]) for one in found)
    return True


def _name(given: str) -> str:
    """Returns the id of a request: the client's if it is valid, else a new one."""
    return given if _ID.fullmatch(given) else new_id()


def new_id() -> str:
    """Returns an id for a request that has none."""
    return uuid.uuid4().hex


def _method(scope: Scope) -> str:
    """Returns the method, for a label: clients can make up others."""
    method: str = scope["method"]
    return method if method in ("GET", "HEAD", "POST", "OPTIONS") else OTHER


def _log(scope: Scope, status: int, seconds: float, name: str) -> None:
    """Writes the line of a request, without its query, which may hold what is private."""
    fields = {
        "client": scope["client"][0] if scope.get("client") else "",
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 6),
        "http_request_id": name,
    }
    logger.info("answered", extra={ABOUT: fields})
