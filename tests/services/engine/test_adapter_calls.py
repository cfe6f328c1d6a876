"""Loads and drops of adapters in one engine: the last load of a name counts, and nothing of one that failed stays."""

import dataclasses
import time
from pathlib import Path

import pytest

from sluice_server.engine.adapters.host_slots import HostSlots
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.services.engine.adapter_calls import AdapterCalls
from sluice_server.services.messages.details import AdapterDropped, AdapterState
from sluice_server.services.messages.messages import AdapterCall, Envelope, Failed, Message, Result
from sluice_server.services.messages.work import AdapterWork, DropAdapter, LoadAdapter
from tests.engine.test_engine_oracle import ROOMY, SHAPES, make_engine
from tests.oracle.adapters import write_adapter
from tests.oracle.checkpoints import make_checkpoint

WAIT_S = 60.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = make_checkpoint(tmp_path_factory.mktemp("calls") / "base", SHAPES["llama"])
    for seed, name in enumerate(("one", "two")):
        write_adapter(found.parent / "adapters" / name, read_config(found), seed=seed, rank=2)
    write_adapter(found.parent / "adapters" / "broken", read_config(found), rank=2, use_dora=True)
    return found


class Calls:
    """The calls of a gateway, and their answers by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, AdapterState | AdapterDropped | str] = {}
        self.calls = AdapterCalls(engine, self._take)

    def _take(self, message: Message) -> None:
        if isinstance(message, Failed):
            self.answers[message.envelope.request_id] = message.reason
        else:
            assert isinstance(message, Result) and isinstance(message.value, AdapterState | AdapterDropped)
            self.answers[message.envelope.request_id] = message.value

    def ask(self, name: str, work: AdapterWork) -> None:
        self.calls.handle(AdapterCall(Envelope(name, "g0"), work))

    def wait(self, *names: str) -> None:
        """Takes turns until these are answered."""
        end_s = time.monotonic() + WAIT_S
        while not set(names) <= set(self.answers):
            assert time.monotonic() < end_s, "an answer does not come"
            self.calls.turn()
            self.engine.idle()

    @property
    def names(self) -> dict[str, str]:
        """Paths by name, as reported."""
        return {one.name: one.path for one in self.calls.changed() or ()}

    def check_nothing_stays(self) -> None:
        """Asserts that no adapter is known, in memory or in a slot."""
        manager = self.engine.adapters
        assert manager is not None
        manager.idle()
        assert list(manager.residencies()) == [] and manager.requests.shelf.slot_bytes == 0
        slots = manager.loader.slots
        assert isinstance(slots, HostSlots) and not any(slots) and not manager.loader._host


@pytest.fixture
def calls(directory: Path) -> Calls:
    folder = str(directory.parent / "adapters")
    return Calls(make_engine(directory, dataclasses.replace(ROOMY, max_adapters=2, adapter_dir=folder)))


def test_of_two_loads_of_a_name_at_once_the_last_counts(calls: Calls) -> None:
    calls.ask("a", LoadAdapter("name", "one"))
    calls.ask("b", LoadAdapter("name", "two"))
    calls.wait("a", "b")
    first, last = calls.answers["a"], calls.answers["b"]
    assert isinstance(first, AdapterState) and isinstance(last, AdapterState) and first.digest != last.digest
    assert calls.names == {"name": "two"}
    assert calls.engine.adapters is not None
    assert [one.digest for one in calls.engine.adapters.residencies()] == [last.digest]


def test_an_unload_while_it_is_loaded_ends_the_load(calls: Calls) -> None:
    calls.ask("a", LoadAdapter("name", "one"))
    calls.ask("b", DropAdapter("name"))
    calls.wait("a", "b")
    assert calls.answers["a"] == "ADAPTER_UNLOADED" and isinstance(calls.answers["b"], AdapterDropped)
    assert calls.names == {}
    calls.engine.adapters.read("one").result()  # type: ignore[union-attr] # the thread has come past the load
    calls.wait()
    calls.check_nothing_stays()


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (LoadAdapter("name", "broken"), "FEATURE_UNSUPPORTED"),
        (LoadAdapter("name", "nowhere"), "ADAPTER_NOT_FOUND"),
        (LoadAdapter("name", "../adapters/one"), "ADAPTER_INVALID"),
        (LoadAdapter("name", "one", b"x" * 32), "ADAPTER_CHANGED"),
    ],
    ids=["of another kind", "missing", "outside", "another digest"],
)
def test_nothing_of_a_load_that_failed_stays(calls: Calls, work: LoadAdapter, reason: str) -> None:
    calls.ask("a", work)
    calls.wait("a")
    assert calls.answers["a"] == reason and calls.names == {}
    calls.check_nothing_stays()


def test_a_failed_load_leaves_the_name_with_the_adapter_that_it_had(calls: Calls) -> None:
    calls.ask("a", LoadAdapter("name", "one"))
    calls.ask("b", LoadAdapter("name", "broken"))
    calls.wait("a", "b")
    assert calls.answers["b"] == "FEATURE_UNSUPPORTED" and calls.names == {"name": "one"}
