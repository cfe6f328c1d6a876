"""Frames and events that are ready together come as one message: the same ones in the same order."""

from collections.abc import Iterable, Iterator, Sequence

import grpc
from sluice.v1 import inference_pb2

from sluice_server.services.gateway.calls.joined_frames import MAX_FURTHER, joined, joined_events
from sluice_server.services.gateway.calls.responses import converse_response
from sluice_server.services.gateway.generation.converse import MAX_JOINED
from sluice_server.services.gateway.generation.events import DeltaEvent, PongEvent, TaggedEvent
from sluice_server.services.messages.details import TokenRecord
from sluice_server.services.messages.messages import Envelope, Submit, Text
from tests.services.gateway.fake_ring import generation, running, spec, stream_request, text_of
from tests.services.gateway.talker import Talker

Frame = inference_pb2.ConverseResponse


def apart(messages: Iterable[Frame]) -> Iterator[Frame]:
    """The frames of messages one by one, as a client reads them."""
    for message in messages:
        further = list(message.more)
        message.ClearField("more")
        yield message
        assert not any(one.more for one in further)
        yield from further


async def opened(talk: Talker, tag: int, *, joined: bool) -> Submit:
    num = len(talk.rig.ring.submits)
    await talk.send(tag, open=inference_pb2.Open(spec=spec(), joined_frames=joined or None))
    await talk.rig.ring.until(lambda: len(talk.rig.ring.submits) > num)
    assert (await talk.read()).WhichOneof("frame") == "accepted"
    return talk.rig.ring.submits[-1]


async def played(*, joined: bool, num: int = 3) -> list[Frame]:
    """What comes for that many generations whose words come together."""
    async with running() as rig:
        talk = Talker(rig)
        submits = [await opened(talk, tag, joined=joined) for tag in range(1, num + 1)]
        words = [generation(submit, ["a", "b"]) for submit in submits]
        rig.ring.play(*(text for texts in words for text in texts))
        await talk.call.done_writing()
        messages = await talk.remaining()
        assert await talk.call.code() == grpc.StatusCode.OK and not rig.lane.manager.books.streams
        return messages


def kinds(frames: Iterable[Frame]) -> dict[int, list[tuple[str | None, str]]]:
    """The frames of each generation in order."""
    found: dict[int, list[tuple[str | None, str]]] = {}
    for frame in frames:
        found.setdefault(frame.tag, []).append((frame.WhichOneof("frame"), frame.delta.text))
    return found


async def test_joined_frames_are_those_that_come_one_by_one() -> None:
    alone, together = await played(joined=False), await played(joined=True)
    assert not any(message.more for message in alone) and len(together) < len(alone)
    assert kinds(apart(together)) == kinds(alone)


async def test_a_client_that_did_not_ask_gets_none() -> None:
    assert len(await played(joined=False)) == 3 * len(("prompt_info", "delta", "delta", "output_finished", "finished"))


async def test_a_message_has_no_more_frames_than_the_contract_says() -> None:
    async with running() as rig:
        talk = Talker(rig)
        submit = await opened(talk, 1, joined=True)
        (stream,) = rig.lane.manager.books.streams
        rig.ring.play(text_of(submit, 0, "a", first=True))
        await talk.kinds(1)
        for nonce in range(MAX_JOINED + 10):
            stream._reply(TaggedEvent(0, PongEvent(nonce)))  # type: ignore[attr-defined] # faster than any client asks
        pongs: list[int] = []
        while len(pongs) < MAX_JOINED + 10:
            message = await talk.read()
            assert len(message.more) < MAX_JOINED
            pongs += [one.pong.nonce for one in apart([message]) if one.WhichOneof("frame") == "pong"]
        assert pongs == list(range(MAX_JOINED + 10))
        talk.call.cancel()


def test_a_message_of_joined_frames_is_bounded_in_bytes() -> None:
    text = Text(Envelope("r", "g"), 0, (TokenRecord(1, b"x"),), "x" * 100_000)
    events = iter([TaggedEvent(tag, DeltaEvent("r.g", 1, [text], False)) for tag in range(1, 20)])
    sizes = []
    while (first := next(events, None)) is not None:
        made = joined(first, events)
        data = made if isinstance(made, bytes) else made.SerializeToString()
        sizes.append(len(Frame.FromString(data).more))
    assert sum(sizes) + len(sizes) == 19 and max(sizes) == 3


def test_one_event_alone_is_a_message_without_more() -> None:
    made = joined(TaggedEvent(0, PongEvent(7)), iter(()))
    assert isinstance(made, Frame) and made.pong.nonce == 7


def test_the_encoding_is_that_of_the_message() -> None:
    events = [TaggedEvent(tag, PongEvent(tag)) for tag in (1, 300, 1 << 40)]
    made = joined(events[0], iter(events[1:]))
    want = converse_response(events[0])
    want.more.extend(converse_response(one) for one in events[1:])
    assert isinstance(made, bytes) and Frame.FromString(made) == want


Events = inference_pb2.StreamGenerateResponse


async def streamed(*, joined: bool) -> Sequence[Events]:
    """The messages of a generation whose words come together."""
    async with running() as rig:
        asked = stream_request()
        asked.joined_events = joined
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b", "c"]))
        return [message async for message in rig.stub.StreamGenerate(asked)]


async def test_joined_events_are_those_that_come_one_by_one() -> None:
    alone, (first,) = await streamed(joined=False), await streamed(joined=True)
    assert not any(message.more for message in alone) and not any(message.more for message in first.more)
    further = list(first.more)
    first.ClearField("more")
    came = [(message.WhichOneof("event"), message.delta.seq, message.delta.text) for message in (first, *further)]
    assert came == [(message.WhichOneof("event"), message.delta.seq, message.delta.text) for message in alone]


async def test_the_first_text_comes_with_the_acceptance_and_not_with_later_text() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(), joined_events=True))
        submit = await rig.ring.next_submit()
        rig.ring.play(text_of(submit, 0, "a", first=True))
        message = await call.read()
        assert isinstance(message, Events) and message.accepted.generation_id
        assert [one.delta.text for one in message.more] == ["a"]
        rig.ring.play(text_of(submit, 1, "b", last=True))
        message = await call.read()
        assert isinstance(message, Events) and message.delta.text == "b"
        assert [one.WhichOneof("event") for one in message.more] == ["output_finished", "finished"]
        assert await call.code() == grpc.StatusCode.OK


def test_a_message_of_joined_events_is_bounded() -> None:
    text = Text(Envelope("r", "g"), 0, (TokenRecord(1, b"x"),), "x")
    event = DeltaEvent("r.g", 1, [text], False)
    made = joined_events(Events, event, iter([event] * 400))
    assert isinstance(made, bytes) and len(Events.FromString(made).more) == MAX_FURTHER
