"""The generation service alone, without a transport, before a ring that the test plays."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError, cancelled, stage_lost
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.access.identity import Identity
from sluice_server.services.gateway.access.quota import Quotas, TenantLimits
from sluice_server.services.gateway.contract.errors import slow_consumer
from sluice_server.services.gateway.generation.detached import DetachedSessions
from sluice_server.services.gateway.generation.events import DeltaEvent, FailedEvent, FinishedEvent, StreamEvent
from sluice_server.services.gateway.generation.service import GenerationService
from sluice_server.services.gateway.generation.stream import GenerationStream
from sluice_server.services.gateway.models.registry import Models
from sluice_server.services.gateway.requests.open_request import RequestStatus
from sluice_server.services.messages.details import Tokenized
from sluice_server.services.messages.messages import Cancel, Grant, Message, Result, Submit
from sluice_server.services.messages.work import pack_ids
from tests.services.gateway.fake_ring import SETTINGS, generation, manager_of, spec, text_of

OTHER = Identity("other", frozenset())
CALL = CallMetadata("StreamGenerate")
DETACH = types_pb2.SchedulingOptions(on_disconnect=types_pb2.DISCONNECT_ACTION_DETACH)


class ServiceBench:
    """A generation service, and the messages it sends to the ring."""

    def __init__(self) -> None:
        self.emitted: list[Message] = []
        quotas = Quotas(lambda tenant: TenantLimits(), 1)
        self.manager = manager_of(SETTINGS, self.emitted.append, quotas)
        self.manager.refusal = None
        self.detached = DetachedSessions(self.manager, asyncio.get_running_loop().call_later, 4)
        self.is_leaving = False
        self.service = GenerationService(Models({"m0": self}, self.manager.books), self.manager.observer)

    @property
    def submit(self) -> Submit:
        """The last submitted request."""
        return [one for one in self.emitted if isinstance(one, Submit)][-1]

    def play(self, *words: str) -> None:
        """Delivers a whole generation."""
        for text in generation(self.submit, list(words)):
            self.manager.answers.handle(text)

    def begin(self) -> None:
        """Delivers the first token of a generation."""
        self.manager.answers.handle(text_of(self.submit, 0, "a", first=True))


@pytest.fixture
async def bench() -> ServiceBench:
    return ServiceBench()


@contextlib.contextmanager
def fails(reason: str) -> Iterator[None]:
    with pytest.raises(ServiceError) as caught:
        yield
    assert caught.value.reason == reason


def texts(events: list[StreamEvent]) -> list[str]:
    return ["".join(one.text for one in event.texts) for event in events if isinstance(event, DeltaEvent)]


async def test_a_generation_is_a_stream_of_events(bench: ServiceBench) -> None:
    stream = bench.service.generate(CALL, spec())
    bench.play("a", "b", "c")
    events = await read(stream)
    stream.close(None)
    names = ["AcceptedEvent", "DeltaEvent", "DeltaEvent", "OutputFinishedEvent", "FinishedEvent"]
    assert [type(event).__name__ for event in events] == names
    assert texts(events) == ["a", "bc"]
    assert isinstance(events[-1], FinishedEvent) and events[-1].used.num_completion == 3
    assert not len(bench.manager.requests) and not any(isinstance(one, Cancel) for one in bench.emitted)


async def test_closing_the_stream_cancels(bench: ServiceBench) -> None:
    stream = bench.service.generate(CALL, spec())
    bench.begin()
    assert stream.next() is not None
    stream.close(cancelled())
    stream.close(cancelled())
    assert [one.envelope for one in bench.emitted if isinstance(one, Cancel)] == [bench.submit.envelope]
    assert bench.manager.num_open == 0
    assert bench.manager.requests.state(bench.submit.envelope.request_id, CALL.caller.tenant) is RequestStatus.FAILED


async def test_what_fails_is_raised(bench: ServiceBench) -> None:
    with fails("INVALID_PARAMETER"):
        bench.service.generate(CALL, spec(credit_window=3))
    stream = bench.service.generate(CALL, spec())
    bench.begin()
    bench.manager.fail_all(stage_lost("engine"))
    with fails("STAGE_LOST"):
        await read(stream)
    stream.close(stage_lost("engine"))
    assert not len(bench.manager.requests)


async def read(stream: GenerationStream) -> list[StreamEvent]:
    events = []

    async def write(event: StreamEvent) -> None:
        events.append(event)

    await stream.write_all(write)
    return events


async def test_a_reader_that_takes_nothing_is_ended_while_it_waits_for_its_transport(bench: ServiceBench) -> None:
    stream = bench.service.generate(CALL, spec())
    bench.begin()

    async def write(event: StreamEvent) -> None:
        await asyncio.Event().wait()

    async def stand_still() -> None:
        with stream.interruptible():
            await stream.write_all(write)

    reading = asyncio.create_task(stand_still())
    while not stream.request.delivery.progress.is_writing:
        await asyncio.sleep(0)
    stream.request.break_off(slow_consumer(1))
    with fails("SLOW_CONSUMER"):
        await reading
    assert not reading.cancelled()


async def test_a_reader_without_a_task_of_its_own_is_told_at_its_next_event(bench: ServiceBench) -> None:
    stream = bench.service.generate(CALL, spec(scheduling=DETACH))
    bench.begin()
    stream.next()
    stream.request.break_off(slow_consumer(1))
    with fails("SLOW_CONSUMER"):
        stream.next()


async def test_a_generation_that_outlives_its_reader_is_resumed(bench: ServiceBench) -> None:
    stream = bench.service.generate(CALL, spec(scheduling=DETACH))
    bench.begin()
    assert [type(stream.next()).__name__ for _ in range(2)] == ["AcceptedEvent", "DeltaEvent"]
    stream.close(cancelled())
    request_id = bench.submit.envelope.request_id
    bench.manager.answers.handle(text_of(bench.submit, 1, "b", last=True))
    point = types_pb2.GenerationSpec(resume=types_pb2.ResumePoint(generation_id=request_id, after_seq=1))
    again = bench.service.resume(CALL, point, request_id)
    assert texts(await read(again)) == ["b"]
    with fails("GENERATION_NOT_FOUND"):
        bench.service.resume(CallMetadata("ResumeGenerate", caller=OTHER), point, request_id)


async def test_whole_answers(bench: ServiceBench) -> None:
    reader = bench.service.generate_whole(CallMetadata("Generate"), spec())
    bench.play("a", "b")
    completed = await reader.completed()
    assert ["".join(text.text for text in one.texts) for one in completed.outputs] == ["ab"]
    reader.close(None)
    reader = bench.service.tokenize(CallMetadata("Tokenize"), inference_pb2.TokenizeRequest(text="a"))
    value = Tokenized(pack_ids([5]), {5: b"a"})
    bench.manager.answers.handle(Result(bench.submit.envelope, value))
    assert await reader.outcome() == value
    reader.close(None)
    assert not len(bench.manager.requests)


async def test_a_generation_is_cancelled_by_its_id(bench: ServiceBench) -> None:
    stream = bench.service.generate(CALL, spec())
    found = bench.service.cancel(CALL.caller.tenant, bench.submit.envelope.request_id)
    assert found == (RequestStatus.RUNNING, RequestStatus.CANCELLED)
    with pytest.raises(ServiceError) as caught:
        await read(stream)
    assert caught.value.code is Code.CANCELLED
    stream.close(caught.value)


async def test_a_conversation_is_credit_and_changes_by_tag(bench: ServiceBench) -> None:
    session = bench.service.converse(lambda: CallMetadata("Converse"))
    asked = inference_pb2.Open(spec=spec(credit_window=1), keep_input_open=True)
    session.open(1, asked)
    session.append(1, inference_pb2.Append(text="more"))
    session.grant(1, 4)
    session.append(2, inference_pb2.Append(text="too late"))
    session.close_input(1)
    session.half_close()
    assert [type(one).__name__ for one in bench.emitted] == ["Submit", "Append", "Grant", "CloseInput"]
    assert isinstance(bench.emitted[2], Grant) and bench.emitted[2].tokens == 4
    bench.play("a", "b")
    told = [(one.tag, type(one.event).__name__) async for one in session]
    session.close(None)
    assert told[:2] == [(2, "RefusedEvent"), (1, "AcceptedEvent")] and told[-1] == (1, "FinishedEvent")
    assert not bench.manager.books.streams and not len(bench.manager.requests)


async def test_closing_a_conversation_cancels_what_runs_on_it(bench: ServiceBench) -> None:
    session = bench.service.converse(lambda: CallMetadata("Converse"))
    session.open(1, inference_pb2.Open(spec=spec()))
    session.cancel(1, 7)
    told = [(await anext(session)).event for _ in range(2)]
    assert isinstance(told[-1], FailedEvent) and told[-1].error.field == "output_index"
    session.open(2, inference_pb2.Open(spec=spec()))
    session.close(stage_lost("serving"))
    assert not len(bench.manager.requests)
