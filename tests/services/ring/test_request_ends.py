"""Requests that the ring loop of a process ends: unsendable messages, and peers of another version."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
import zmq

from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.details import Tokenized
from sluice_server.services.messages.messages import (
    SCHEMA_VERSION,
    Cancel,
    Envelope,
    Failed,
    Message,
    Prompt,
    Result,
    Submit,
    Text,
    Tokens,
)
from sluice_server.services.messages.processes import Mismatch, Role
from sluice_server.services.messages.work import Generate, Scheduling, Stops, TextPrompt
from sluice_server.services.ring.backlog import Backlog
from sluice_server.services.ring.frames import FrameWriter, Header
from sluice_server.services.ring.loop import RingLoop
from sluice_server.services.ring.schema_mismatches import AGAIN_S, FRESH_S, MAX_KNOWN, SchemaMismatches
from tests.services.ring.one_stage import LIMIT, NEXT, passed_on

A, B = (Envelope(f"{one:032x}", NEXT) for one in (1, 2))
PARAMS = SamplingParams()


def sent_by(role: Role, envelope: Envelope) -> Message:
    """The messages that a role sends for a request."""
    match role:
        case Role.GATEWAY:
            return Submit(envelope, Generate(TextPrompt("a" * 100), PARAMS))
        case Role.TOKENIZER:
            return Prompt(envelope, bytes(100), PARAMS, Stops(), Scheduling(), 0.0)
        case Role.ENGINE:
            return Tokens(envelope, 0, (1,) * 100)
        case Role.DETOKENIZER:
            return Text(envelope, 0, (), "a" * 100)


class Noting:
    """A stage that notes its messages, and forwards a Cancel as all stages do."""

    progress = 0

    def __init__(self, ring: RingLoop) -> None:
        self.ring = ring
        self.taken: list[Message] = []

    def handle(self, message: Message) -> None:
        self.taken.append(message)
        if isinstance(message, Cancel | Result):
            self.ring.emit(message)

    def turn(self) -> bool:
        return False

    def reap(self) -> None:
        """Does nothing."""


@pytest.mark.parametrize("role", Role)
async def test_at_the_bound_a_request_ends_and_nothing_blocks(tmp_path: Path, role: Role) -> None:
    """The peer does not read. The request's messages are removed from the backlog, to make room for its end."""
    ring = RingLoop(role, "x-0", f"ipc://{tmp_path}/in", {NEXT: f"ipc://{tmp_path}/nobody"}, LIMIT)
    outbox, stage = ring.outboxes[NEXT], Noting(ring)
    outbox._backlog = Backlog(msgspec.msgpack.Encoder().encode, LIMIT, 3000)
    ring.start(stage)
    ring.emit(sent_by(role, B))
    while not ring.counts["dropped"]:
        ring.emit(sent_by(role, A))
    async with asyncio.timeout(10):
        while not stage.taken:
            await asyncio.sleep(0.001)
    (told,) = stage.taken
    left = [(one.kind, one.envelope) for one in outbox._backlog.head(1 << 20)]
    ring.stop()
    if role is Role.GATEWAY:
        assert isinstance(told, Failed) and told.reason == "BACKLOG_FULL" and told.retry_after_s > 0
        assert left == [(Submit, B), (Cancel, A)]
    else:
        assert told == Cancel(A)
        # A detokenizer has no next stage for a Cancel.
        ends = [(Failed, A)] if role is Role.DETOKENIZER else [(Cancel, A), (Failed, A)]
        assert [one for one in left if one[1] is B] and left[1:][-len(ends) :] == ends


async def test_a_message_that_is_too_large_ends_its_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    large = Result(A, Tokenized(bytes(LIMIT - 500), {}))
    stages: list[Noting] = []

    def make(ring: RingLoop) -> Noting:
        ring.outboxes[NEXT]._backlog = Backlog(msgspec.msgpack.Encoder().encode, LIMIT - 1000)
        stages.append(Noting(ring))
        return stages[0]

    came = await passed_on(Role.TOKENIZER, make, [large], tmp_path, lambda came: bool(came))
    assert [type(one) for one in came] == [Cancel, Failed] and isinstance(came[1], Failed)
    assert came[1].message.startswith("the tokenizer made a message of this request that is larger")
    assert [one.name for one in caplog.records].count("sluice_server.services.faults") == 1


async def test_a_stranger_is_told_of_once_in_the_log_and_forward(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Frames of other processes are delivered meanwhile."""
    stranger, context = FrameWriter("tokenizer-1", 5), zmq.Context[zmq.Socket[bytes]]()
    data = bytearray(stranger.frame(1, [b"what no other version can read"]))
    data[4:6] = (SCHEMA_VERSION + 1).to_bytes(2, "little")
    socket = context.socket(zmq.PUSH)

    def make(ring: RingLoop) -> Noting:
        socket.connect(f"ipc://{tmp_path}/in")
        for _ in range(500):
            socket.send(bytes(data))
        return Noting(ring)

    with caplog.at_level(logging.ERROR):
        came = await passed_on(Role.ENGINE, make, [], tmp_path, lambda came: bool(came))
    socket.close()
    context.term()
    assert came[0] == Mismatch("engine-0", SCHEMA_VERSION, "tokenizer-1", SCHEMA_VERSION + 1)
    assert len([one for one in caplog.records if "are refused" in one.getMessage()]) == 1


def recorded(mismatches: SchemaMismatches, header: Header, now_s: float) -> list[bool]:
    return [is_new for _, is_new in mismatches.record([header], now_s)]


def test_other_versions_are_reported_seldom_and_anew_after_each_boot() -> None:
    mismatches, header = SchemaMismatches("engine-0", 2), Header("t", 5, 3)
    assert mismatches.summary(0.0) == ""
    assert [recorded(mismatches, header, now_s) for now_s in (0.0, 0.1, AGAIN_S)] == [[True], [], [False]]
    assert recorded(mismatches, header._replace(epoch=6), AGAIN_S) == [True]
    assert mismatches.summary(AGAIN_S) == "refuses frames of t (version 3); it reads version 2"
    assert mismatches.summary(AGAIN_S + FRESH_S + 1) == ""


def test_names_that_are_made_up_are_not_all_remembered() -> None:
    mismatches = SchemaMismatches("engine-0", 2)
    found = [recorded(mismatches, Header(f"t{at}", 5, 3), 0.0) for at in range(1000)]
    assert found.count([True]) == MAX_KNOWN
