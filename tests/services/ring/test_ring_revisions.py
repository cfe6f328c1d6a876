"""What each stage refuses of a revision other than its own, and which requests a mixed ring affects."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.details import Admitted
from sluice_server.services.messages.messages import Append, Cancel, Envelope, Failed, Message, Prompt, Submit, Tokens
from sluice_server.services.messages.processes import Probe, Role
from sluice_server.services.messages.work import Generate, Scheduling, Stops, TextOptions, TextPrompt
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.peers import NEXT

ENVELOPE = Envelope("0000000500000000000000000000000a", "g")


class Quiet:
    """A stage that notes its messages."""

    progress = 0

    def __init__(self) -> None:
        self.seen: list[Message] = []

    def handle(self, message: Message) -> None:
        self.seen.append(message)

    def turn(self) -> bool:
        return False

    def reap(self) -> None:
        """Does nothing."""


class Place:
    """One role's loop, which the test feeds; its outbox is inspected."""

    def __init__(self, role: Role, served: str, directory: Path) -> None:
        self.ring = RingLoop(role, str(role), f"ipc://{directory}/{role}", {NEXT[role]: "ipc://nowhere"}, 1 << 20)
        self.ring.revision = served
        self.stage = Quiet()
        self.sent: list[Message] = []

        def emit(message: Message) -> None:
            self.sent.append(message)

        self.ring.emit = emit  # type: ignore[method-assign] # there is no next one here

    def take(self, message: Message) -> None:
        self.ring._take(self.stage, message)


@pytest.fixture(params=[Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(request.param, "c1-w1" if request.param is Role.ENGINE else "c1", tmp_path)
    yield made
    made.ring.stop()


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
    gone = ["c2-w1", "c1x-w1", *(["c1-w2"] if place.ring.revision == "c1-w1" else [])]
    for revision in gone:
        for message in work(revision):
            place.take(message)
    assert place.stage.seen == []
    assert [one.reason for one in place.sent if isinstance(one, Failed)] == ["REVISION_CHANGED"] * 4 * len(gone)


def test_work_of_its_own_revision_passes(place: Place) -> None:
    for message in work("c1-w1"):
        place.take(message)
    later = Tokens(
        msgspec.structs.replace(ENVELOPE, revision="c2"), 1, (1,)
    )  # finds no beginning here: the stage knows
    place.take(later)
    place.take(Cancel(msgspec.structs.replace(ENVELOPE, revision="c2")))
    assert len(place.stage.seen) == 6 and place.sent == []


def test_a_probe_tells_the_revision_and_that_the_ring_is_mixed(place: Place) -> None:
    told: list[bool] = []
    place.ring.on_mixed = lambda: told.append(True)
    place.take(Probe("g", 1, (str(place.ring.process_id),)))
    assert not told
    place.take(Probe("g", 2, (str(place.ring.process_id),), is_mixed=True))
    assert told == [True]
    assert [one.visits[-1].revision for one in place.sent if isinstance(one, Probe)] == [place.ring.revision] * 2


def test_a_probe_is_told_to_the_process_that_it_visits(place: Place) -> None:
    told: list[Probe] = []
    place.ring.on_probe = told.append
    probe = Probe("g", 1, (str(place.ring.process_id),), num_generating=7)
    place.take(probe)
    assert told == [probe]
    assert [one.num_generating for one in place.sent if isinstance(one, Probe)] == [7]  # the next ones hear it, too


def test_one_whose_files_have_changed_ends(place: Place) -> None:
    def leave() -> None:
        raise SystemExit(75)

    place.ring.on_mixed = leave
    with pytest.raises(SystemExit):
        place.take(Probe("g", 1, (str(place.ring.process_id),), is_mixed=True))


def test_a_fault_of_a_turn_is_the_last_thing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that are scheduled already come while the loop ends; they would end it for another reason."""
    turns: list[int] = []

    def turn() -> bool:
        turns.append(1)
        raise ValueError(f"fault {len(turns)}")

    monkeypatch.setattr(place.stage, "turn", turn)
    place.ring._loop, place.ring._stage = asyncio.new_event_loop(), place.stage
    try:
        with pytest.raises(SystemExit) as ended:
            place.ring._turn()
        place.ring._turn()
    finally:
        place.ring._loop.close()
    assert ended.value.code == 70 and str(ended.value.__cause__) == "fault 1"
    assert len(turns) == 1
