"""The gateway's place in the ring: what comes round is delivered to it; what it sends it emits itself."""

from services.gateway.gateway import Gateway
from services.messages.messages import Message


class GatewayStage:
    """Feeds one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.progress = 0
        self._gateway = gateway

    def handle(self, message: Message) -> None:
        """Deliver. Raises TypeError for a message that no gateway takes."""
        self.progress += 1
        self._gateway.deliver(message)

    def turn(self) -> bool:
        """Nothing between messages."""
        return False

    def reap(self) -> None:
        """Nothing: the requests are its own."""
