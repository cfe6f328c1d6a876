"""What a process of the ring does with its messages, as the loop calls it."""

from typing import Protocol

from sluice_server.services.messages.messages import Message


class Stage(Protocol):
    """The work of one process. All methods are called on the loop and must not block except to compute."""

    @property
    def progress(self) -> int:
        """A number that grows while the stage works; sent in probes."""

    def handle(self, message: Message) -> None:
        """Handle one message."""

    def turn(self) -> bool:
        """Work between messages. Returns True to get another turn at once."""

    def reap(self) -> None:
        """Drop the state of requests whose gateways are gone; called periodically."""
