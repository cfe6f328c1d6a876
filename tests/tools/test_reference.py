"""The generated pages of the documentation: up to date and complete."""

from pathlib import Path

import pytest
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ServiceConfig
from sluice_server.services.telemetry import catalogue
from tools import reference, reference_contract, reference_metrics, reference_settings


def test_what_is_checked_in_is_what_is_made() -> None:
    assert list(reference.stale_pages(reference.ROOT)) == [], "run make reference"


def test_a_page_that_differs_or_lacks_is_stale(tmp_path: Path) -> None:
    for path, text in reference.pages().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert reference.stale_pages(tmp_path) == {}
    (tmp_path / "docs/reference/metrics.md").write_text("other\n")
    (tmp_path / "docs/reference/options.md").unlink()
    assert {path.name for path in reference.stale_pages(tmp_path)} == {"metrics.md", "options.md"}


@pytest.fixture(scope="module")
def contract() -> str:
    """The contract's page."""
    return reference_contract.page(reference_contract.descriptors())


def test_the_contract_has_every_call_field_and_value(contract: str) -> None:
    for file in (one.DESCRIPTOR for one in (control_pb2, inference_pb2, types_pb2)):
        for service in file.services_by_name.values():
            assert all(f"#### {method.name}\n" in contract for method in service.methods)
        for message in file.message_types_by_name.values():
            assert f"### {message.name}\n" in contract
            assert all(f"| `{field.name}` |" in contract for field in message.fields)
        for enum in file.enum_types_by_name.values():
            assert all(f"| `{value.name}` |" in contract for value in enum.values)


def test_the_contract_says_types_and_comments(contract: str) -> None:
    assert "| `params` | [EffectiveParams](#effectiveparams) | 7 | Every parameter as it was used. |" in contract
    assert "| `page_size` | optional `uint32` | 1 |" in contract
    assert "| `outputs` | repeated [Output](#output) | 4 |" in contract
    assert "[GenerateRequest](#generaterequest) → [GenerateResponse](#generateresponse)" in contract


def test_every_setting_is_among_the_options() -> None:
    page = reference_settings.page()
    for cls in (EngineConfig, ServiceConfig):
        for name in cls.__dataclass_fields__:
            assert f"| `SLUICE_{name.upper()}` |" in page
    assert "| `--max-queued-requests` | `SLUICE_MAX_QUEUED_REQUESTS` | `4096` | the most requests" in page


def test_every_metric_is_there() -> None:
    page = reference_metrics.page()
    assert catalogue.ALL and all(f"| `{metric.prometheus}` | `{metric.name}` |" in page for metric in catalogue.ALL)
