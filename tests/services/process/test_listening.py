import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process import listening


@pytest.mark.parametrize(
    ("listen", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/tmp/x", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("localhost.example.org:1", False),
    ],
)
def test_plaintext_is_for_this_host(listen: str, local: bool) -> None:
    assert listening.is_local(listen) is local
    listening.check_plaintext("listen", listen, True, False)
    listening.check_plaintext("listen", listen, False, True)
    listening.check_keyless("vllm_listen", listen, True)
    if local:
        listening.check_plaintext("listen", listen, False, False)
        listening.check_keyless("vllm_listen", listen, False)
    else:
        with pytest.raises(ServiceError, match="--insecure"):
            listening.check_plaintext("listen", listen, False, False)
        with pytest.raises(ServiceError, match="--tls-client-ca"):
            listening.check_keyless("vllm_listen", listen, False)


@pytest.mark.parametrize("listen", ["", "1", "host:", ":1", "host:x", "host:²"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ServiceError, match="is not host:port"):
        listening.split("listen", listen)
    with pytest.raises(ServiceError, match="--listen: the port 65536 is above 65535"):
        listening.split("listen", "host:65536")


def test_addresses_as_clients_name_them() -> None:
    assert listening.split("listen", "[::1]:5") == ("::1", 5)
    assert listening.bound("[::1]:0", 7) == "[::1]:7"
    assert listening.bound("unix:/tmp/x", 1) == "unix:/tmp/x"


def test_one_gateway_serves_the_listener_without_keys() -> None:
    listening.check_vllm(ServiceConfig(gateways=2))
    listening.check_vllm(ServiceConfig(vllm_listen="127.0.0.1:1"))
    with pytest.raises(ServiceError, match="--gateways: 2 processes"):
        listening.check_vllm(ServiceConfig(vllm_listen="127.0.0.1:1", gateways=2))
    with pytest.raises(ServiceError, match="--vllm-listen: 0"):
        listening.check_vllm(ServiceConfig(vllm_listen="0.0.0.0:1"))
