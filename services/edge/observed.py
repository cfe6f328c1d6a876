"""What the application reports of each request, and the page of metrics: an interface, and one that keeps nothing."""

from typing import Protocol


class HttpObserver(Protocol):
    """Takes what happens to requests. The process that runs the application provides it."""

    def began(self) -> None:
        """A request has arrived."""

    def ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """Its answer was sent, or its client left (499). `route` is a path of the table of routes, or "other"."""

    def exposition(self) -> bytes:
        """Returns the metrics of the process in Prometheus's text format."""


class UnobservedHttp(HttpObserver):
    """Keeps nothing."""

    def began(self) -> None:
        """Does nothing."""

    def ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """Does nothing."""

    def exposition(self) -> bytes:
        """Returns an empty page."""
        return b""
