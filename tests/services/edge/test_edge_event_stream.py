"""Pieces of streams are written as their events come, one after the other, and only while the client reads."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.services.edge.answers import COMPLETION
from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.event_stream import DONE, EventPieces
from sluice_server.services.edge.report import AnswerReport
from sluice_server.services.edge.resumed import EdgeStream
from sluice_server.services.edge.shared import Event
from sluice_server.services.edge.stream import Chunks
from sluice_server.services.edge.writing import AnswerParts

Response = inference_pb2.StreamGenerateResponse
ACCEPTED = Response(accepted=types_pb2.Accepted(generation_id="g"))


def text(written: str) -> Response:
    return Response(delta=types_pb2.Delta(text=written, seq=1, consumed=1))


class Call:
    """A stream whose events the test brings."""

    def __init__(self) -> None:
        self.waiting: deque[Sequence[Event] | Exception] = deque()
        self._on_news: Callable[[], None] = lambda: None

    def attach(self, on_news: Callable[[], None]) -> None:
        self._on_news = on_news

    def received(self) -> Sequence[Event] | None:
        if not self.waiting:
            return None
        found = self.waiting.popleft()
        if isinstance(found, Exception):
            raise found
        return found

    def bring(self, *found: Sequence[Event] | Exception) -> None:
        self.waiting.extend(found)
        self._on_news()


class Parts:
    """Keeps what is written; the client reads when the test says so."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()

    @property
    def is_free(self) -> bool:
        return self.reads.is_set()

    def write(self, part: bytes) -> None:
        assert self.is_free
        self.written.append(part)

    async def drain(self) -> None:
        await self.reads.wait()

    @property
    def text(self) -> str:
        return b"".join(self.written).decode()


async def begun(*calls: Call, parts: Parts) -> "asyncio.Task[None]":
    report = AnswerReport(num_prompts=len(calls))
    streams, firsts = cast(list[EdgeStream], list(calls)), [[ACCEPTED]] * len(calls)
    pieces = EventPieces(streams, firsts, Chunks(COMPLETION, 1, report), cast(AnswerParts, parts))
    running = asyncio.create_task(pieces.write_all())
    await asyncio.sleep(0)
    return running


async def test_events_are_written_in_the_turn_in_which_they_come() -> None:
    call, parts = Call(), Parts()
    running = await begun(call, parts=parts)
    assert not parts.written
    call.bring([text("a")], [text("b"), text("c")])
    assert [part.count(b"data: ") for part in parts.written] == [1, 2]
    call.bring([])
    assert parts.written[-1] == DONE
    await running


async def test_a_client_that_does_not_read_gets_all_later() -> None:
    call, parts = Call(), Parts()
    running = await begun(call, parts=parts)
    parts.reads.clear()
    call.bring([text("a")])
    call.bring([text("b")], [])
    await asyncio.sleep(0)
    assert not parts.written and len(call.waiting) == 3
    parts.reads.set()
    await running
    assert parts.text.index('"a"') < parts.text.index('"b"') < parts.text.index("[DONE]")


async def test_streams_of_several_prompts_are_written_as_they_come() -> None:
    one, other, parts = Call(), Call(), Parts()
    running = await begun(one, other, parts=parts)
    other.bring([text("b")])
    one.bring([text("a")], [])
    other.bring([text("c")])
    assert DONE not in parts.written
    other.bring([])
    await running
    found = [parts.text.index(word) for word in ('"b"', '"a"', '"c"', "[DONE]")]
    assert found == sorted(found) and parts.text.count("[DONE]") == 1


async def test_an_error_is_the_last_event() -> None:
    call, parts = Call(), Parts()
    running = await begun(call, parts=parts)
    call.bring([text("a")], EdgeError(503, "server_error", "gone"))
    await running
    assert b'"gone"' in parts.written[-1] and DONE not in parts.written


async def test_a_bug_is_raised_to_the_request() -> None:
    call, parts = Call(), Parts()
    running = await begun(call, parts=parts)
    call.bring(KeyError("bug"))
    with pytest.raises(KeyError):
        await running
    call.bring([text("a")])
    assert not parts.written
