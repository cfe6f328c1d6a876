"""What a process of the ring does with messages that no stage needs, and with work for another revision."""

import msgspec
import pytest

from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.control import ClearCache, Operation
from sluice_server.services.messages.details import Admitted
from sluice_server.services.messages.messages import (
    Append,
    Cancel,
    Envelope,
    Failed,
    KeepTrace,
    Message,
    Prompt,
    Submit,
    Tokens,
)
from sluice_server.services.messages.processes import Probe, Role
from sluice_server.services.messages.work import Generate, Scheduling, Stops, TextOptions, TextPrompt
from sluice_server.services.ring.leases import LEASE_S, Leases
from sluice_server.services.ring.ring_handlers import RingHandlers

ENVELOPE = Envelope("0000000500000000000000000000000a", "g")


class AtRest:
    """A stage that has got this far; no message of the ring is its own."""

    progress = 6

    def handle(self, message: Message) -> None:
        raise AssertionError("handled by none of the ring's")

    def turn(self) -> bool:
        return False

    def reap(self) -> None:
        """Does nothing."""


class Place:
    """The handlers of one role's process, what they emit, and what they leave to the stage."""

    def __init__(self, role: Role, served: str) -> None:
        self.name = str(role)
        self.sent: list[Message] = []
        self.left: list[Message] = []
        self.leases = Leases()
        self.handlers = RingHandlers(role, (self.name, 5), self.leases, self.sent.append, lambda: 4)
        self.handlers.revision = served

    def take(self, message: Message) -> None:
        handler = self.handlers.by_type.get(type(message))
        if handler is None or not handler(AtRest(), message):
            self.left.append(message)


@pytest.fixture(params=[Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param, "c1-w1" if request.param is Role.ENGINE else "c1")


def work(revision: str) -> list[Message]:
    """The messages that give a stage new work."""
    envelope = msgspec.structs.replace(ENVELOPE, revision=revision)
    params = SamplingParams()
    admitted = Admitted(num_prompt=1, num_cached=0, max_tokens=1, stops=Stops(), text=TextOptions())
    return [
        Submit(envelope, Generate(TextPrompt("a"), params)),
        Prompt(envelope, b"", params, Stops(), Scheduling(), 0.0),
        Append(envelope, TextPrompt("b")),
        Tokens(envelope, 0, (1,), admitted=admitted),
    ]


def test_work_of_another_revision_fails_at_every_stage(place: Place) -> None:
    gone = ["c2-w1", "c1x-w1", *(["c1-w2"] if place.handlers.revision == "c1-w1" else [])]
    for revision in gone:
        for message in work(revision):
            place.take(message)
    assert place.left == []
    assert [one.reason for one in place.sent if isinstance(one, Failed)] == ["REVISION_CHANGED"] * 4 * len(gone)


def test_work_of_its_own_revision_passes(place: Place) -> None:
    for message in work("c1-w1"):
        place.take(message)
    later = Tokens(
        msgspec.structs.replace(ENVELOPE, revision="c2"), 1, (1,)
    )  # finds no beginning here: the stage knows
    place.take(later)
    place.take(Cancel(msgspec.structs.replace(ENVELOPE, revision="c2")))
    assert len(place.left) == 6 and place.sent == []


def test_a_probe_tells_the_revision_and_that_the_ring_is_mixed(place: Place) -> None:
    told: list[bool] = []
    place.handlers.on_mixed = lambda: told.append(True)
    place.take(Probe("g", 1, ("d",)))
    assert not told
    place.take(Probe("g", 2, ("d",), is_mixed=True))
    assert told == [True]
    assert [one.visits[-1].revision for one in place.sent if isinstance(one, Probe)] == [place.handlers.revision] * 2


def test_a_probe_is_told_to_the_process_that_it_visits(place: Place) -> None:
    told: list[Probe] = []
    place.handlers.on_probe = told.append
    probe = Probe("g", 1, ("d",), num_generating=7)
    place.take(probe)
    assert told == [probe]
    assert [one.num_generating for one in place.sent if isinstance(one, Probe)] == [7]  # the next ones hear it, too


def test_one_whose_files_have_changed_ends(place: Place) -> None:
    def leave() -> None:
        raise SystemExit(75)

    place.handlers.on_mixed = leave
    with pytest.raises(SystemExit):
        place.take(Probe("g", 1, ("d",), is_mixed=True))


def test_a_probe_tells_who_it_has_visited_and_what_was_lost(place: Place) -> None:
    place.handlers.identity = "abc"
    place.take(Probe("g", 1, ("d",)))
    [passed] = place.sent
    assert isinstance(passed, Probe)
    [visit] = passed.visits
    assert (visit.id, visit.epoch, visit.progress, visit.lost, visit.identity) == (visit.role, 5, 6, 4, "abc")


def test_a_probe_renews_the_lease_of_its_gateway(place: Place) -> None:
    place.leases.seen("g", 1)
    place.leases.pass_time(LEASE_S)
    place.take(Probe("g", 1, ("d",), epoch=1))
    place.leases.pass_time(1.0)
    assert not place.leases.is_over(msgspec.structs.replace(ENVELOPE, epoch=1))


def test_only_probes_that_others_sent_are_passed_on() -> None:
    gateway = Place(Role.GATEWAY, "c1")
    gateway.take(Probe("g", 1, ("d",)))
    assert gateway.sent == [] and len(gateway.left) == 1


def test_the_trace_of_a_request_is_kept_here_and_at_the_next(place: Place) -> None:
    kept: list[str] = []
    place.handlers.on_keep = kept.append
    place.take(KeepTrace(ENVELOPE))
    assert kept == [ENVELOPE.request_id] and place.sent == [KeepTrace(ENVELOPE)]


def test_an_operation_is_carried_out_by_the_process_that_it_names_and_passed_on_by_others(place: Place) -> None:
    own: list[Operation] = []
    place.handlers.on_operation = own.append
    mine, other = (Operation("g", 1, 1, name, ClearCache()) for name in (place.name, "x"))
    place.take(mine)
    place.take(other)
    assert own == [mine] and place.sent == [other] and place.left == []
