"""Every SDK loads an adapter, lists it and takes its name away; a folder that is not there is told as an error."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_server.engine.models.config import read_config
from sluice_server.services.checkpoint.model_source import resolve_model
from tests.conformance.conftest import MODEL
from tests.conformance.driver import told
from tests.conformance.sdks import Sdk
from tests.oracle.adapters import write_adapter
from tests.system.service import Service, serve


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with one adapter in its folder."""
    folder: Path = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "customer", read_config(resolve_model("demo", "").directory), rank=2)
    with serve(*MODEL, "--adapter-dir", str(folder), "--max-adapters", "1") as running:
        yield running


def test_adapters_are_loaded_listed_and_unloaded(sdk: Sdk, adapted: Service) -> None:
    end = told(sdk, adapted.address, call="adapters", text="customer")
    assert (end["text"], end["error"]) == ("64 customer ", None)
    end = told(sdk, adapted.address, call="adapters", text="nowhere")
    assert (end["error"]["code"], end["error"]["reason"]) == ("NOT_FOUND", "ADAPTER_NOT_FOUND")
