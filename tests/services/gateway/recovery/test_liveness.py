"""Which engines are lost by the silence of probes, and when it is the ring."""

import msgspec

from sluice_server.services.gateway.recovery.liveness import IDLE_AFTER_S, IDLE_S, Liveness, routes_of
from sluice_server.services.messages.processes import Probe, Role, Visit

STAGES = (("t0", "t1"), ("e0", "e1"), ("d0",))
ROLES = (Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER)


def back(probe: Probe, epoch: int = 1, revision: str = "r") -> Probe:
    """The probe as it comes back."""
    route = zip(ROLES, probe.route, strict=True)
    return msgspec.structs.replace(
        probe, visits=tuple(Visit(role, name, epoch, 0, revision=revision) for role, name in route)
    )


def beats(liveness: Liveness, num: int, *gone: str) -> None:
    """Seconds in which all probes come back that do not visit one of these processes."""
    for _ in range(num):
        for probe in liveness.send(1.0):
            if not set(gone) & set(probe.route):
                liveness.returned(back(probe))


def test_routes_visit_every_process_beside_each_engine() -> None:
    assert routes_of(STAGES) == (("t0", "e0", "d0"), ("t1", "e0", "d0"), ("t0", "e1", "d0"), ("t1", "e1", "d0"))
    assert routes_of((("t0",), ("e0",), ("d0", "d1"))) == (("t0", "e0", "d0"), ("t0", "e0", "d1"))


def test_a_silent_engine_beside_another_is_lost_and_the_ring_is_not() -> None:
    liveness = Liveness("g", 1, STAGES, 5.0)
    beats(liveness, 1)
    assert liveness.complete == {"e0", "e1"}
    beats(liveness, 7, "e1")
    assert liveness.lost_engines(0.0) == {"e1"} and not liveness.lost_engines(step_s=10.0)
    assert not liveness.is_lost(0.0, {"e0"}) and liveness.is_lost(0.0, {"e0", "e1"})
    liveness.forget({"e1"})
    assert liveness.complete == {"e0"}
    beats(liveness, 1)
    assert liveness.complete == {"e0", "e1"} and not liveness.lost_engines(0.0)


def test_a_silent_tokenizer_loses_the_ring_and_no_engine() -> None:
    liveness = Liveness("g", 1, STAGES, 5.0)
    beats(liveness, 1)
    beats(liveness, 7, "t1")
    assert not liveness.lost_engines(0.0) and liveness.is_lost(0.0, {"e0", "e1"})


def test_when_all_is_silent_no_engine_is_to_blame() -> None:
    liveness = Liveness("g", 1, STAGES, 5.0)
    beats(liveness, 7, "e0", "e1")
    assert not liveness.lost_engines(0.0) and liveness.is_lost(0.0, {"e0"})


def test_the_revision_of_a_lost_engine_does_not_count() -> None:
    liveness = Liveness("g", 1, STAGES, 5.0)
    for probe in liveness.send(1.0):
        liveness.returned(back(probe, revision="old" if "e1" in probe.route else "r"))
    assert liveness.revision is None
    for probe in liveness.send(1.0):
        if "e0" in probe.route:
            liveness.returned(back(probe))
    liveness.forget({"e1"})
    assert liveness.revision == "r"


def test_an_idle_ring_that_answers_gets_few_probes() -> None:
    beat_s = IDLE_S / 4

    def sent(num: int, *, answers: bool = True, **how: bool) -> int:
        found = 0
        for _ in range(num):
            probes = liveness.send(beat_s, **how)
            found += bool(probes)
            for probe in probes if answers else ():
                liveness.returned(back(probe))
        return found

    liveness = Liveness("g", 1, STAGES, 5.0)
    assert sent(40) == 40
    num_until_idle = int(IDLE_AFTER_S / beat_s)
    assert sent(num_until_idle, is_used=False) == num_until_idle
    assert sent(40, is_used=False) == 10
    assert sent(8, is_used=False, is_mixed=True) == 8  # revisions differ: each probe may be the one that agrees
    sent(num_until_idle, is_used=False)
    assert sent(8) == 8  # a request has come
    sent(num_until_idle, is_used=False)
    assert sent(40, is_used=False, answers=False) >= 37  # the silence may be a loss
    assert liveness.is_lost(0.0, {"e0"})
