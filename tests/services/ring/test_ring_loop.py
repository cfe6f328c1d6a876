"""Ring loops over real ipc: order of messages, probes during a step, and refused revisions."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.details import Tokenized
from sluice_server.services.messages.messages import Cancel, Envelope, Failed, Message, Result, Submit
from sluice_server.services.messages.processes import Probe, Role
from sluice_server.services.messages.work import Generate, TextPrompt
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.sockets import Inbox, Outbox
from sluice_server.services.ring.transport import Transport
from tests.services.ring.net import ENVELOPE, LIMIT, Net, drained, sent


class Echo:
    """A stage that forwards everything, and raises on results."""

    def __init__(self, ring: RingLoop) -> None:
        self.progress = 3
        self.num_turns = 0
        self.seen: list[Message] = []
        self._ring = ring

    def handle(self, message: Message) -> None:
        self.seen.append(message)
        if isinstance(message, Result):
            raise ValueError("a bug")
        if self._ring.process_id != "gateway-1":
            self._ring.emit(message)

    def turn(self) -> bool:
        self.num_turns += 1
        return False

    def reap(self) -> None:
        """Does nothing."""


class Faulty(Echo):
    """A stage that raises in each turn."""

    def turn(self) -> bool:
        self.num_turns += 1
        raise ValueError(f"fault {self.num_turns}")


async def test_a_ring_of_four_loops(tmp_path: Path) -> None:
    ids = {Role.GATEWAY: "gateway-1", Role.TOKENIZER: "t", Role.ENGINE: "e", Role.DETOKENIZER: "d"}
    order = list(Role)
    rings = {
        role: RingLoop(
            role,
            ids[role],
            f"ipc://{tmp_path}/{ids[role]}",
            {ids[order[(i + 1) % 4]]: f"ipc://{tmp_path}/{ids[order[(i + 1) % 4]]}"},
            LIMIT,
        )
        for i, role in enumerate(order)
    }
    stages = {role: Echo(ring) for role, ring in rings.items()}
    for role, ring in rings.items():
        ring.start(stages[role])
    home = stages[Role.GATEWAY].seen
    rings[Role.GATEWAY].emit(Probe("gateway-1", 1, ("t", "e", "d")))
    rings[Role.GATEWAY].emit(Result(ENVELOPE, Tokenized(b"", {})))
    async with asyncio.timeout(10):
        while len(home) < 2:
            await asyncio.sleep(0.01)
    probe = next(message for message in home if isinstance(message, Probe))
    assert [(visit.role, visit.id, visit.progress) for visit in probe.visits] == [
        (role, ids[role], 3) for role in order[1:]
    ]
    broken = next(message for message in home if isinstance(message, Failed))
    assert (broken.reason, broken.envelope) == ("ENGINE_FAULT", ENVELOPE)
    for ring in rings.values():
        ring.stop()


class Busy(Echo):
    """A stage whose first turn lasts until a probe that arrives meanwhile has been answered."""

    def __init__(self, ring: RingLoop, sender: Outbox, answers: Inbox) -> None:
        super().__init__(ring)
        self.answered: list[Message] = []
        self.seen_in_turn: list[Message] | None = None
        self._sender = sender
        self._answers = answers

    def turn(self) -> bool:
        deadline = time.monotonic() + 10
        while self.seen_in_turn is None:
            self._sender.flush()
            self._ring.attend()
            self.answered += self._answers.drain()
            if self.answered or time.monotonic() > deadline:
                self.seen_in_turn = list(self.seen)
        return False

    def reap(self) -> None:
        """Does nothing."""


async def test_probes_are_answered_while_a_stage_computes(net: Net, tmp_path: Path) -> None:
    """Other messages are neither handled during the turn nor lost, and keep their order."""
    address = f"ipc://{tmp_path}/e"
    ring = RingLoop(Role.ENGINE, "e", address, {"d": f"ipc://{tmp_path}/d"}, LIMIT)
    sender = net.outbox(address)
    stage = Busy(ring, sender, net.inbox(f"ipc://{tmp_path}/d"))
    other = Envelope("0000000600000000000000000000000b", "gateway-1")
    for message in (Cancel(ENVELOPE), Probe("gateway-1", 1, ("e", "d")), Cancel(other)):
        sender.put(message)
    ring.start(stage)
    async with asyncio.timeout(20):
        while len(stage.seen) < 2:
            await asyncio.sleep(0.01)
    assert [type(message) for message in stage.answered] == [Probe]
    assert stage.seen_in_turn == [] and stage.seen == [Cancel(ENVELOPE), Cancel(other)]
    ring.stop()


async def test_work_for_another_model_revision_fails(net: Net, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/e"
    ring = RingLoop(Role.ENGINE, "e", address, {"d": f"ipc://{tmp_path}/d"}, LIMIT)
    ring.handlers.revision = "new"
    sender, answers, stage = net.outbox(address), net.inbox(f"ipc://{tmp_path}/d"), Echo(ring)
    work = Generate(TextPrompt("a"), SamplingParams())
    for revision in ("old", "new"):
        sender.put(Submit(msgspec.structs.replace(ENVELOPE, revision=revision), work))
    ring.start(stage)
    seen: list[Message] = []
    async with asyncio.timeout(20):
        while len(stage.seen) < 1 or not seen:
            sender.flush()
            seen += answers.drain()
            await asyncio.sleep(0.01)
    ring.stop()
    assert [one.envelope.revision for one in stage.seen if isinstance(one, Submit)] == ["new"]
    assert isinstance(seen[0], Failed) and seen[0].reason == "REVISION_CHANGED"


async def test_a_cancel_leaves_at_once(net: Net, tmp_path: Path) -> None:
    """It does not wait for the end of the loop's next turn, which may be long."""
    ring = RingLoop(Role.ENGINE, "e", f"ipc://{tmp_path}/e", {"d": f"ipc://{tmp_path}/d"}, LIMIT)
    answers = net.inbox(f"ipc://{tmp_path}/d")
    ring.start(Echo(ring))
    ring.emit(Cancel(ENVELOPE))  # connects, and arrives in some turn
    assert await drained(answers, 1) == [Cancel(ENVELOPE)]
    ring.emit(Cancel(ENVELOPE))
    assert ring.outboxes["d"].backlog == 0
    ring.stop()


async def test_what_is_emitted_outside_a_turn_leaves_without_one(net: Net, tmp_path: Path) -> None:
    """A turn would look for messages that have not come. What is too large fails its request there, too."""
    ring = RingLoop(Role.ENGINE, "e", f"ipc://{tmp_path}/e", {"d": f"ipc://{tmp_path}/d"}, LIMIT)
    answers, stage = net.inbox(f"ipc://{tmp_path}/d"), Echo(ring)
    await sent(ring.outboxes["d"], [Cancel(ENVELOPE)])  # connects: no later message waits for a turn
    ring.inbox.drain()  # else its descriptor is readable
    ring.start(stage)
    await drained(answers, 1)
    num_turns, answer = stage.num_turns, Result(ENVELOPE, Tokenized(b"", {}))
    ring.emit(answer)
    assert await drained(answers, 2) == [answer]
    ring.emit(Result(ENVELOPE, Tokenized(bytes(LIMIT), {})))
    [cancelled, failed] = await drained(answers, 4)
    assert isinstance(failed, Failed) and stage.seen == [cancelled] == [Cancel(ENVELOPE)]
    assert stage.num_turns == num_turns
    ring.stop()


async def test_peers_join_leave_and_come_back(tmp_path: Path, net: Net) -> None:
    """One that comes back and still runs takes what is sent to it: its frames are of a later epoch."""
    addresses = {name: f"ipc://{tmp_path}/{name}" for name in ("e0", "e1")}
    inboxes = {name: net.inbox(address) for name, address in addresses.items()}
    ring = RingLoop(Role.TOKENIZER, "t", f"ipc://{tmp_path}/t", {"e0": addresses["e0"]}, LIMIT)
    ring.start(Echo(ring))

    async def reaches(name: str, num_frames: int) -> None:
        ring.emit(Cancel(msgspec.structs.replace(ENVELOPE, engine=name)))
        while inboxes[name].counts["frames"] < num_frames:  # a connection that is being made takes nothing yet
            ring.schedule()
            assert len(inboxes[name].drain()) <= 1
            await asyncio.sleep(0.001)
        assert not inboxes[name].counts["repeated"]

    async with asyncio.timeout(20):
        ring.change_peers(addresses)
        await reaches("e1", 1)
        await reaches("e0", 1)
        ring.change_peers({"e0": addresses["e0"]})
        ring.emit(Cancel(msgspec.structs.replace(ENVELOPE, engine="e1")))
        assert ring.outboxes.keys() == {"e0"}
        ring.change_peers(addresses)
        await reaches("e1", 2)
        await reaches("e0", 2)
        moved = f"ipc://{tmp_path}/elsewhere"  # the same id at another address
        inboxes["e1"] = net.inbox(moved)
        ring.change_peers({**addresses, "e1": moved})
        await reaches("e1", 1)
    ring.stop()


async def test_rings_that_share_a_context_leave_one_after_the_other(net: Net, tmp_path: Path) -> None:
    shared = Transport()
    rings = [
        RingLoop(Role.GATEWAY, "g", f"ipc://{tmp_path}/g{at}", {"t": f"ipc://{tmp_path}/t"}, LIMIT, shared)
        for at in (0, 1)
    ]
    inbox = net.inbox(f"ipc://{tmp_path}/t")
    for ring in rings:
        ring.start(Echo(ring))
    rings[0].stop()
    assert not shared.context.closed
    rings[1].emit(Cancel(ENVELOPE))
    assert await drained(inbox, 1) == [Cancel(ENVELOPE)]
    rings[1].stop()
    assert shared.context.closed


async def test_a_fault_of_a_turn_is_the_last_thing(tmp_path: Path) -> None:
    """Turns that are scheduled already come while the loop ends; they would end it for another reason."""
    ring = RingLoop(Role.ENGINE, "e", f"ipc://{tmp_path}/e", {"d": f"ipc://{tmp_path}/d"}, LIMIT)
    stage = Faulty(ring)
    ring.start(stage)
    with pytest.raises(SystemExit) as ended:
        ring._turn()
    ring._turn()
    ring.stop()
    assert ended.value.code == 70 and str(ended.value.__cause__) == "fault 1"
    assert stage.num_turns == 1
