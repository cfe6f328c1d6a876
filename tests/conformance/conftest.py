"""The SDKs of the conformance suite, and the servers that all cases share."""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_server.services.gateway.access.identity import digest_of
from tests.conformance.sdks import SDKS, Sdk
from tests.services.certificates import Authority, written
from tests.system.service import Service, generate, serve, spec

PROMPT = "Once upon a time"
QUICK = frozenset(
    f"test_{case}"
    for case in ("converse", "credit_exactness", "fields_at_fault", "resume_after_a_cut_connection", "stream")
)
MODEL = ("--model", "demo", "--dtype", "float32")  # a resumed generation must not meet another rounding


@functools.cache
def why_not(sdk: Sdk) -> str:
    """The reason why an SDK cannot take part. Builds its driver once."""
    return sdk.build()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as long all cases but those of the Python client that need one server and do not wait."""
    for item in items:
        if not isinstance(item, pytest.Function) or "sdk" not in item.fixturenames:
            continue
        chosen = item.callspec.params["sdk"]
        assert isinstance(chosen, Sdk)
        if chosen.name != "python" or item.originalname not in QUICK:
            item.add_marker(pytest.mark.long)


@pytest.fixture(params=SDKS, ids=[sdk.name for sdk in SDKS])
def sdk(request: pytest.FixtureRequest) -> Sdk:
    """Each SDK in turn; skipped, with the reason, where it cannot be built."""
    chosen = request.param
    assert isinstance(chosen, Sdk)
    if reason := why_not(chosen):
        pytest.skip(reason)
    return chosen


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """A service with two gateways and without TLS. Cases kill its gateways in turn, within the restart limit."""
    with serve(*MODEL, "--gateways", "2", "--max-restarts", "1000") as running:
        yield running


@pytest.fixture(scope="session")
def expected(service: Service) -> str:
    """The text of 200 tokens after the prompt."""
    with service.stub() as stub:
        return generate(stub, spec(PROMPT, 200)).text


@dataclasses.dataclass(frozen=True, slots=True)
class Secured:
    """A server with TLS, and the files to reach it with."""

    address: str
    ca: str
    other_ca: str
    certificate: str
    key: str


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A server with TLS and the API key "k"."""
    folder = tmp_path_factory.mktemp("keyed")
    access = folder / "access.toml"
    access.write_text(f'[[keys]]\nsha256 = "{digest_of("k").hex()}"\ntenant = "acme"\nscopes = ["generate"]\n')
    yield from _secured(folder, "--access-file", str(access))


@pytest.fixture(scope="session")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A server with TLS that requires client certificates."""
    folder = tmp_path_factory.mktemp("mutual")
    yield from _secured(folder, "--tls-client-ca", str(folder / "ca.pem"))


def _secured(folder: Path, *options: str) -> Iterator[Secured]:
    authority = Authority()
    files = written(folder, authority)
    certificate, key = authority.issue("client").write(folder, "client")
    (folder / "other.pem").write_bytes(Authority("another").pem)
    paths = [str(path) for path in (folder / "ca.pem", folder / "other.pem", certificate, key)]
    tls = ("--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    with serve(*MODEL, *tls, *options) as running:
        yield Secured(running.address, *paths)
