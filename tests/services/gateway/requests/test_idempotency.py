import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.gateway.requests.idempotency import IdempotencyKeys


def test_a_key_is_refused_while_its_request_is_open() -> None:
    keys = IdempotencyKeys()
    keys.add("a", "key", "first")
    with pytest.raises(ServiceError, match="first") as caught:
        keys.check("a", "key")
    assert caught.value.code is Code.ALREADY_EXISTS
    keys.remove("a", "key")
    keys.check("a", "key")


def test_another_tenant_may_use_the_same_key() -> None:
    keys = IdempotencyKeys()
    keys.add("a", "key", "first")
    keys.check("b", "key")
    keys.remove("b", "key")
    with pytest.raises(ServiceError):
        keys.check("a", "key")


def test_requests_without_a_key_are_never_the_same() -> None:
    keys = IdempotencyKeys()
    keys.add("a", "", "first")
    keys.check("a", "")
    keys.remove("a", "")
