"""What the edge reads of a generation whose connection is lost: a server that ends calls as a lost connection does."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from sluice.errors import DETAILS_KEY
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.recovery import MOST_LOSSES, repeated
from sluice_server.services.edge.resumed import EdgeStream, kind_of
from sluice_server.services.edge.shared import SharedCalls

SPEC = types_pb2.GenerationSpec(text="p")
TRACED = (("traceparent", f"00-{1:032x}-{1:016x}-01"),)  # with which a stream has a call of its own
ENDED = types_pb2.OutputFinished(finish_reason=types_pb2.FINISH_REASON_LENGTH)


def delta(seq: int) -> types_pb2.Delta:
    return types_pb2.Delta(seq=seq, text=str(seq), tokens=[types_pb2.Token(id=seq)], consumed=1)


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclasses.dataclass
class LossyServer:
    """Ends the first `losses` calls after `before` deltas; with `reason` it says so itself."""

    losses: int = 1
    before: int = 2
    reason: str = ""
    num_calls: int = 0
    resumed: list[types_pb2.GenerationSpec] = dataclasses.field(default_factory=list)

    async def generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        await self._lose(context)
        return inference_pb2.GenerateResponse(generation_id="g")

    async def stream(
        self, request: inference_pb2.StreamGenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        made = inference_pb2.StreamGenerateResponse
        yield made(accepted=types_pb2.Accepted(generation_id=f"g{self.num_calls}"))
        for seq in range(1, self.before + 1):
            yield made(delta=delta(seq))
        await self._lose(context)
        for seq in range(self.before + 1, 4):
            yield made(delta=delta(seq))
        yield made(output_finished=ENDED)
        yield made(finished=types_pb2.Finished())

    async def resume(
        self, request: inference_pb2.ResumeGenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.ResumeGenerateResponse]:
        made = inference_pb2.ResumeGenerateResponse
        self.resumed.append(request.spec)
        yield made(accepted=types_pb2.Accepted(generation_id=f"g{self.num_calls}"))
        await self._lose(context)
        for seq in range(request.spec.resume.after_seq, 4):  # the first was sent before
            yield made(delta=delta(seq))
        yield made(output_finished=ENDED)
        yield made(output_finished=ENDED)
        yield made(finished=types_pb2.Finished())

    async def _lose(self, context: Context) -> None:
        self.num_calls += 1
        if self.num_calls > self.losses:
            return
        if not self.reason:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="no")
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=self.reason))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no", ((DETAILS_KEY, status.SerializeToString()),))


@contextlib.asynccontextmanager
async def behind(lossy: LossyServer) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_unary_rpc_method_handler(
            lossy.generate,
            inference_pb2.GenerateRequest.FromString,
            inference_pb2.GenerateResponse.SerializeToString,
        ),
        "StreamGenerate": grpc.unary_stream_rpc_method_handler(
            lossy.stream,
            inference_pb2.StreamGenerateRequest.FromString,
            inference_pb2.StreamGenerateResponse.SerializeToString,
        ),
        "ResumeGenerate": grpc.unary_stream_rpc_method_handler(
            lossy.resume,
            inference_pb2.ResumeGenerateRequest.FromString,
            inference_pb2.ResumeGenerateResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("sluice.v1.InferenceService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def read(lossy: LossyServer) -> list[str]:
    """The kinds of the events; of deltas the text."""
    found = []
    async with behind(lossy) as channel:
        stream = EdgeStream(channel, SPEC, TRACED, SharedCalls(channel))
        while events := await stream.read():
            found += [event.delta.text or str(kind_of(event)) for event in events]
    return found


@pytest.mark.parametrize("before", [0, 1, 2, 3])
async def test_each_event_is_read_once(before: int) -> None:
    lossy = LossyServer(before=before)
    assert await read(lossy) == ["accepted", "1", "2", "3", "output_finished", "finished"]
    assert len(lossy.resumed) == (before > 0)  # without a delta the request is sent again
    for spec in lossy.resumed:
        assert (spec.text, spec.resume.after_seq) == ("p", before)
        assert list(spec.resume.outputs[0].token_ids) == list(range(1, before + 1))


@pytest.mark.parametrize(("losses", "calls"), [(MOST_LOSSES, MOST_LOSSES + 1), (99, MOST_LOSSES + 1)])
async def test_a_request_that_loses_each_connection_is_not_sent_for_ever(losses: int, calls: int) -> None:
    lossy = LossyServer(losses=losses)
    if losses > MOST_LOSSES:
        with pytest.raises(EdgeError):
            await read(lossy)
    else:
        assert (await read(lossy))[-1] == "finished"
    assert lossy.num_calls == calls


async def test_what_the_server_says_itself_is_passed_on() -> None:
    lossy = LossyServer(reason="DRAINING")
    with pytest.raises(EdgeError):
        await read(lossy)
    assert lossy.num_calls == 1


async def test_a_call_that_answers_once_is_made_again() -> None:
    lossy = LossyServer(losses=2)
    async with behind(lossy) as channel:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        asked = inference_pb2.GenerateRequest(spec=SPEC)
        assert (await repeated(channel, lambda: stub.Generate(asked))).generation_id == "g"
    assert lossy.num_calls == 3
