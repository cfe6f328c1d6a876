"""Environment variables that look like settings: a misspelt one is reported, ours and Kubernetes' are not."""

import os
import subprocess
import sys

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.services.cli.environment import CHECKED, complaints, names_of
from sluice_server.services.cli.main import app
from sluice_server.services.config import ServiceConfig, to_environment
from tests.deploy.test_deploy import OWN


def test_every_setting_and_every_commands_option_is_known() -> None:
    known = names_of(app)
    assert set(to_environment(EngineConfig(), ServiceConfig())) < known
    assert {"SLUICE_TOKEN", "SLUICE_EDGE_LISTEN", "SLUICE_MAX_TOKENS"} < known
    assert complaints(dict.fromkeys([*known, *OWN, "PATH", "OTEL_SERVICE_NAME"], "1"), lambda: app) == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SLUICE_MAX_NUM_SEQ", "; did you mean SLUICE_MAX_NUM_SEQS?"),
        ("SLUICE_METRIC_PORT", "; did you mean SLUICE_METRICS_PORT?"),
        ("SLUICE_XYZZY", "; `sluice COMMAND --help` lists them"),
    ],
)
def test_what_is_no_setting_is_told_with_the_nearest_name(name: str, hint: str) -> None:
    found = complaints({name: "secret", "SLUICE_MODEL": "demo"}, lambda: app)
    assert found == [f"warning: {name} is no setting and is ignored{hint}"]
    for parent in ("SLUICE_SUPERVISOR_PID", CHECKED):
        assert complaints({name: "secret", parent: "1"}, lambda: app) == []


def test_what_kubernetes_tells_of_a_service_is_no_setting() -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_50051_TCP", "PORT_50051_TCP_ADDR"]
    for service in ("SLUICE", "SLUICE_EDGE"):
        assert complaints({f"{service}_{name}": "x" for name in names}, lambda: app) == []


def test_every_command_tells() -> None:
    command = [sys.executable, "-m", "sluice_server", "version"]
    environment = {**os.environ, "SLUICE_MODLE": "x"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == "warning: SLUICE_MODLE is no setting and is ignored; did you mean SLUICE_MODEL?\n"
