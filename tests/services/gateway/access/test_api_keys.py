"""Keys of `--api-key`: one tenant, every scope but admin, and digests in their place."""

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.checks.service import check_keys
from sluice_server.services.config import ServiceConfig, to_environment
from sluice_server.services.gateway.access.identity import LOCAL, Identity, Scope, access_of, as_digest


def test_each_key_is_the_one_tenant_without_scope_admin() -> None:
    for keys in (("one", "two"), ("one", as_digest("two"))):
        policy = access_of(keys)
        known = Identity(LOCAL.tenant, frozenset({Scope.GENERATE, Scope.CONTROL}))
        assert [policy.by_key(key) for key in ("one", "two", "three", as_digest("two"))] == [known, known, None, None]


def test_a_digest_is_taken_as_it_is() -> None:
    assert as_digest(as_digest("k")) == as_digest("k") != "k"
    with pytest.raises(ServiceError, match="--api-key: what follows sha256: is not 64 hex digits"):
        access_of(["sha256:12"])


@pytest.mark.parametrize("service", [ServiceConfig(api_key=("",)), ServiceConfig(api_key=("a b",))])
def test_a_key_that_no_client_can_send_is_refused(service: ServiceConfig) -> None:
    with pytest.raises(ServiceError, match="--api-key: a key is empty"):
        check_keys(service)


def test_keys_pass_to_a_child_separated_by_spaces() -> None:
    assert to_environment(EngineConfig(), ServiceConfig(api_key=("a", "b")))["SLUICE_API_KEY"] == "a b"
