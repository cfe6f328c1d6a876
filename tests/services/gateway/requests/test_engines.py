"""The choice of an engine: by load or by turns, among those that serve; an attempt stays with its engine."""

from collections import Counter

from sluice_server.services.config import ROUTING
from sluice_server.services.gateway.requests.engines import POLICIES, Engines
from sluice_server.services.messages.details import RoutingReason

IDS = ("e0", "e1", "e2")


def serving(*names: str, routing: str = "least-loaded") -> Engines:
    made = Engines(IDS, routing)
    for name in names:
        made.admit(name)
    return made


def test_the_settings_name_every_policy() -> None:
    assert tuple(POLICIES) == ROUTING


def test_the_engine_with_the_fewest_requests_is_chosen() -> None:
    engines = serving(*IDS)
    assert sorted(engines.take("00000000").engine for _ in range(6)) == ["e0", "e0", "e1", "e1", "e2", "e2"]
    engines.give_back("e1")
    assert engines.take("00000000").engine == "e1"


def test_engines_get_requests_by_turns() -> None:
    engines = serving(*IDS, routing="round-robin")
    for _ in range(5):
        engines.hold("e0")  # load does not count
    assert sorted(engines.take("00000000").engine for _ in range(3)) == list(IDS)


def test_only_engines_that_serve_are_chosen() -> None:
    engines = serving("e0", "e2")
    assert engines.is_any_serving and not engines.is_whole
    assert {engines.take("00000000").engine for _ in range(9)} == {"e0", "e2"}
    engines.drop("e0")
    assert {engines.take("00000000").engine for _ in range(3)} == {"e2"}
    engines.admit("e0")
    engines.admit("e1")
    assert engines.is_whole
    engines.drop_all()
    assert not engines.is_any_serving


def test_an_attempt_stays_with_its_engine_while_that_serves() -> None:
    engines = serving(*IDS)
    for _ in range(8):
        assert engines.take("00000000", before="e1").engine == "e1"
    engines.drop("e1")
    assert engines.take("00000000", before="e1").engine in ("e0", "e2")
    engines.drop_all()
    assert engines.take("00000000", before="e1").engine == "e1"


def test_without_an_engine_that_serves_the_request_id_decides() -> None:
    assert [Engines(IDS, "least-loaded").take(f"{number:08x}").engine for number in range(4)] == [
        "e0",
        "e1",
        "e2",
        "e0",
    ]
    assert Engines((), "least-loaded").take("00000000").engine == ""


def test_an_engine_is_used_while_it_serves_or_has_requests() -> None:
    engines = serving("e0")
    engines.take("00000000")
    engines.drop("e0")
    assert engines.is_used("e0") and not engines.is_used("e1")
    engines.give_back("e0")
    assert not engines.is_used("e0")


def test_requests_of_a_session_stay_together_and_few_move_when_an_engine_joins() -> None:
    engines = serving(*IDS)
    sessions = [f"acme\0{at}" for at in range(300)]
    before = {one: engines.take("00000000", session=one) for one in sessions}
    assert {one.reason for one in before.values()} == {RoutingReason.SESSION}
    assert before == {one: serving(*IDS).take("ffffffff", session=one) for one in sessions}  # as at another gateway
    counts = Counter(one.engine for one in before.values())
    assert all(60 < counts[name] < 140 for name in IDS)
    engines.change((*IDS, "e3"), ())
    engines.admit("e3")
    after = {one: engines.take("00000000", session=one).engine for one in sessions}
    moved = [one for one in sessions if after[one] != before[one].engine]
    assert {after[one] for one in moved} == {"e3"} and 40 < len(moved) < 110
    engines.drop("e1")
    assert {engines.take("00000000", session=one).engine for one in sessions} == {"e0", "e2", "e3"}


def test_each_choice_has_its_reason() -> None:
    engines = serving(*IDS)
    assert engines.take("00000000").reason is RoutingReason.LOAD
    assert engines.take("00000000", before="e1").reason is RoutingReason.STAYED
    assert serving("e0").take("00000000", session="s") == ("e0", RoutingReason.ONLY)
    assert serving(*IDS, routing="round-robin").take("00000000").reason is RoutingReason.TURN
