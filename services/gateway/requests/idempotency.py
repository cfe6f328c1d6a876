"""The idempotency keys of open requests. Pure: no I/O, no clock."""

from sluice_server.services.gateway.contract.errors import duplicate


class IdempotencyKeys:
    """Maps tenant and idempotency key of each open request to its generation id. The key "" is no key."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str], str] = {}

    def check(self, tenant: str, key: str) -> None:
        """Raises `ServiceError` ALREADY_EXISTS for a key of an open request of this tenant."""
        running = self._ids.get((tenant, key))
        if running is not None:
            raise duplicate(running)

    def add(self, tenant: str, key: str, generation_id: str) -> None:
        """Note the key of a request that was opened."""
        if key:
            self._ids[tenant, key] = generation_id

    def remove(self, tenant: str, key: str) -> None:
        """Forget the key of a request that was closed."""
        self._ids.pop((tenant, key), None)
