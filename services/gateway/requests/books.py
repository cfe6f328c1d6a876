"""What the requests of all models of a gateway share: the limits of what may be open, quotas, keys, images, streams."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.scheduler.histogram import Histogram
from sluice_server.services.gateway.access.admission import RequestLimiter
from sluice_server.services.gateway.access.quota import Quotas
from sluice_server.services.gateway.contract.chat import trusting
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.fetching import ImageFetches
from sluice_server.services.gateway.requests.idempotency import IdempotencyKeys
from sluice_server.services.gateway.requests.images import ImageStore, held_bytes
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.gateway.settings import GatewaySettings

GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class RequestStream(Protocol):
    """A stream that can carry many requests and is notified about the server's state."""

    def go_away(self, message: str) -> None:
        """Opens no further requests; called when the server drains."""

    def pause(self, origin: object) -> None:
        """Tells the clients of running requests of this manager that they wait for a process that is restarting."""


@dataclasses.dataclass(frozen=True, slots=True)
class Charge:
    """What a request took when it was admitted."""

    tokens: int  # of its tenant's quota
    image_bytes: int


class Books:
    """The books of one gateway.

    Attributes:
        leaving: what streams are told once the gateway drains; "" before.
        fetches: where images are fetched by their URLs; None: nowhere.
        streams: those that are open; each carries many requests.
        gaps: seconds between two messages with tokens of one output.
        num_generating: requests that have had a token and not their end, as of the latest beat.
    """

    def __init__(self, settings: GatewaySettings, quotas: Quotas, clock: Callable[[], float]) -> None:
        limits = settings.max_open_requests, settings.max_reserved_tokens, settings.max_open_image_bytes
        self.admission = RequestLimiter(*limits)
        self.images = ImageStore(settings.image_store_bytes)
        self.fetches: ImageFetches | None = None
        self.streams: set[RequestStream] = set()
        self.leaving = ""
        self.gaps = Histogram(GAP_S)
        self.num_generating = 0
        self._trusts_all = settings.trust_chat_content
        self._quotas = quotas
        self._keys = IdempotencyKeys()
        self._clock = clock

    def admit(self, tenant: str, asked: TranslatedRequest) -> tuple[TranslatedRequest, Charge]:
        """Takes what a request needs; returns it with its images, and what was taken. Raises `ServiceError`."""
        asked = self.images.resolved(tenant, asked)
        image_bytes = held_bytes(asked)
        charged = self._quotas.take(tenant, asked.reserve, self._clock())
        try:
            self.admission.reserve(asked.reserve, image_bytes)
        except ServiceError:
            self._quotas.settle(tenant, charged, 0, self._clock())
            raise
        if self._trusts_all or self._quotas.trusts_chat_content(tenant):
            asked = dataclasses.replace(asked, work=trusting(asked.work))
        return asked, Charge(charged, image_bytes)

    def check_key(self, tenant: str, key: str) -> None:
        """Raises `ServiceError` ALREADY_EXISTS for the idempotency key of an open request of this tenant."""
        self._keys.check(tenant, key)

    def allows_model(self, tenant: str, names: Iterable[str]) -> bool:
        """Whether requests of a tenant may reach a model that has these names."""
        return self._quotas.allows_model(tenant, names)

    def opened(self, request: OpenRequest, charge: Charge) -> None:
        """Enters an admitted request, which then holds what was taken."""
        request.accounting.charged, request.accounting.image_bytes = charge.tokens, charge.image_bytes
        self.images.keep(request.envelope.tenant, request.asked)
        self._keys.add(request.envelope.tenant, request.asked.idempotency_key, request.generation_id)

    def closed(self, request: OpenRequest) -> None:
        """Gives back what a request held. One of the gateway's own holds nothing."""
        tenant = request.envelope.tenant
        self._keys.remove(tenant, request.asked.idempotency_key)
        if not request.is_own:
            self.admission.release(request.accounting.reserved, request.accounting.image_bytes)
            self._quotas.settle(tenant, request.accounting.charged, request.num_used, self._clock())

    def go_away(self, message: str) -> None:
        """Tells the open streams, and those to come, that the gateway drains."""
        self.leaving = message
        for stream in tuple(self.streams):
            stream.go_away(message)
