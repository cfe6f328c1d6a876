"""What a gateway knows of adapters, from its own loads and from engines' reports."""

from sluice_server.services.gateway.adapters.registry import AdapterRegistry
from sluice_server.services.messages.details import AdapterState


def state(name: str, digest: bytes = b"d", *, in_slot: bool = False, in_host: bool = False) -> AdapterState:
    return AdapterState(name, name, digest * 32, 8, ("q_proj",), 100, in_slot=in_slot, in_host=in_host)


def test_loads_by_way_of_another_gateway_are_learned_and_forgotten() -> None:
    registry = AdapterRegistry()
    assert registry.reported("e0", 1, [state("a"), state("b")]) == []
    assert registry.names() == ["a", "b"]
    registry.reported("e0", 1, [state("a", b"x")])  # loaded again, and the other one unloaded
    found = registry.get("a")
    assert registry.names() == ["a"] and found is not None and found.digest == b"x" * 32


def test_an_engine_that_joins_gets_what_it_lacks_once() -> None:
    registry = AdapterRegistry()
    registry.reported("e0", 1, [state("a"), state("b")])
    assert {one.name for one in registry.reported("e1", 2, [state("b"), state("c")])} == {"a"}
    assert registry.reported("e1", 2, [state("b"), state("c")]) == [] and registry.names() == ["a", "b", "c"]


def test_an_engine_that_was_started_anew_gets_what_it_lacks() -> None:
    registry = AdapterRegistry()
    registry.reported("e0", 1, [state("a"), state("b")])
    assert {one.name for one in registry.reported("e0", 2, [state("b")])} == {"a"}
    assert registry.names() == ["a", "b"]
    assert registry.reported("e0", 1, []) == []  # of the run before
    assert registry.names() == ["a", "b"]


def test_a_report_that_is_older_than_an_answer_changes_nothing() -> None:
    registry = AdapterRegistry()
    registry.reported("e0", 1, [state("old")], 1)
    registry.add(state("a"))
    registry.answered("e0", 2)
    registry.remove("old")
    registry.answered("e0", 3)
    registry.reported("e0", 1, [state("old"), state("a")], 2)
    assert registry.names() == ["a"]
    registry.reported("e0", 1, [state("a")], 3)
    registry.reported("e0", 1, [state("a"), state("old")], 4)  # loaded again, by another gateway
    assert registry.names() == ["a", "old"]
    registry.reported("e0", 2, [state("a"), state("old")], 0)  # started anew
    registry.reported("e0", 2, [state("a")], 1)
    assert registry.names() == ["a"]


def test_the_nearest_copy_of_all_engines_counts() -> None:
    registry = AdapterRegistry()
    registry.reported("e0", 1, [state("a", in_host=True)])
    registry.reported("e1", 1, [state("a", in_slot=True)])
    assert registry.nearest("a") == (True, True)
    registry.lost("e1")
    assert registry.nearest("a") == (False, True)
    assert [one.name for one in registry.of_engine("e0")] == ["a"] and registry.of_engine("e1") == []
