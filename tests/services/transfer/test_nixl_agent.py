"""How NIXL's agent is made, with a stand-in for the package; that it reads is tested in `test_nixl_carrier`."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sluice_server.services.transfer.network_frames import MAX_AGENT_BYTES
from sluice_server.services.transfer.nixl_agent import NixlAgent


class Package:
    """The package, with an agent that keeps what it is told."""

    def __init__(self) -> None:
        self.metadata = b"how to reach me"
        self.backends: list[tuple[str, Any]] = []  # and the config of the agent that they belong to
        self.registered: list[tuple[int, int]] = []

    def agent(self, name: str, settings: SimpleNamespace) -> SimpleNamespace:
        assert not settings.enable_prog_thread and not settings.backends, "this agent is replaced by another"
        made = SimpleNamespace(agent=None)
        made.create_backend = lambda backend: self.backends.append((backend, made.agent.config))
        made.get_reg_descs = lambda regions, memory: [region[:2] for region in regions]
        made.register_memory = self.registered.extend
        made.get_agent_metadata = lambda: self.metadata
        return made


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    found, api = Package(), ModuleType("nixl_cu12._api")
    bound = SimpleNamespace(
        nixlAgentConfig=lambda: SimpleNamespace(useProgThread=False, pthrDelay=0),
        nixlAgent=lambda name, config: SimpleNamespace(name=name, config=config),
    )
    for name, value in (("nixl_agent", found.agent), ("nixl_agent_config", SimpleNamespace), ("nixlBind", bound)):
        setattr(api, name, value)
    monkeypatch.setitem(sys.modules, "nixl_cu12", ModuleType("nixl_cu12"))
    monkeypatch.setitem(sys.modules, "nixl_cu12._api", api)
    return found


def test_its_thread_pauses_between_turns(package: Package) -> None:
    """It would take half a core where nothing is read, and half of the line's rate where two ends share the cores."""
    agent = NixlAgent("engine-0", [(4096, 100), (8192, 200)])
    ((backend, config),) = package.backends
    assert backend == "UCX" and config.useProgThread and config.pthrDelay > 0
    assert package.registered == [(4096, 100), (8192, 200)]
    assert agent.metadata == b"how to reach me"


def test_metadata_that_no_message_holds_is_refused_with_what_to_do(package: Package) -> None:
    package.metadata = bytes(MAX_AGENT_BYTES + 1)
    with pytest.raises(OSError, match="choose fewer devices by UCX_NET_DEVICES"):
        NixlAgent("engine-0", [])
