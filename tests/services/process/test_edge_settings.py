import dataclasses

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import ServiceConfig
from sluice_server.services.edge.settings import HttpSettings
from sluice_server.services.process.edge_settings import (
    EdgeSettings,
    check,
    edge_of,
    http_settings,
    to_environment,
    variable,
)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"listen": "nowhere"}, "--listen: 'nowhere' is not host:port"),
        ({"listen": "unix:/x"}, "--listen: 'unix:/x' is not host:port"),
        ({"listen": "0.0.0.0:80"}, "--insecure"),
        ({"https_cert": "a"}, "--https-cert: and --https-key"),
        ({"https_client_ca": "a"}, "--https-client-ca: needs"),
        ({"allowed_origins": "page.example"}, "--allowed-origins: 'page.example' is not"),
        ({"allowed_origins": "https://page.example/"}, "--allowed-origins"),
        ({"allowed_hosts": "api.example:80"}, "--allowed-hosts: 'api.example:80' is not"),
        ({"allowed_hosts": "https://api.example"}, "--allowed-hosts"),
        ({"root_path": "llm"}, "--root-path: 'llm' is not a path"),
        ({"root_path": "/llm/"}, "--root-path"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, str], what: str) -> None:
    with pytest.raises(ServiceError) as caught:
        check(dataclasses.replace(EdgeSettings(), **changes))  # type: ignore[arg-type] # texts only
    assert what in caught.value.message


def test_what_can_be_used_is() -> None:
    check(EdgeSettings(listen="0.0.0.0:80", insecure=True, allowed_hosts="*", root_path="/a/b"))
    check(EdgeSettings(allowed_origins="https://a.example, http://localhost:3000,*", allowed_hosts="a.b,*.c.example"))


def test_an_edge_of_this_host_alone_answers_no_other_name() -> None:
    assert http_settings(EdgeSettings()) == HttpSettings(allowed_hosts=())
    assert http_settings(EdgeSettings(listen="0.0.0.0:80")).allowed_hosts == ("*",)
    listed = EdgeSettings(listen="0.0.0.0:80", allowed_hosts="a.b, c.d", allowed_origins="*", access_log=True)
    assert http_settings(listed) == HttpSettings(("*",), ("a.b", "c.d"), "", True)


def test_a_child_gets_every_setting_by_its_variable() -> None:
    made = edge_of(ServiceConfig(http="127.0.0.1:1", root_path="/x", grace_s=7.0), "unix:/s", "edge-3", metrics_port=0)
    found = to_environment(made)
    assert found.keys() == {variable(field.name) for field in dataclasses.fields(EdgeSettings)}
    assert (found["SLUICE_ADDRESS"], found["SLUICE_EDGE_ROOT_PATH"], found["SLUICE_EDGE_GRACE_S"]) == (
        "unix:/s",
        "/x",
        "7.0",
    )
