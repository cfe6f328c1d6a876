"""Refused requests on every transport: a failed span under its caller's, a count, and a trace id in the trailers."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.gateway.access.identity import digest_of
from sluice_server.services.gateway.oip.contract import open_inference_pb2 as oip
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.telemetry import catalogue, names
from sluice_server.services.telemetry.collector import Collector
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.observed import RefusedRequest
from sluice_server.services.telemetry.observer import MAX_WAITING, GatewayObserver
from sluice_server.services.telemetry.tracing import Tracer, TraceSampling
from tests.services.gateway.fake_ring import Rig, running, settings, spec, stream_request, unary_request

TRACE, SPAN = "ab" * 16, "cd" * 8
OIP = "inference.GRPCInferenceService/ModelInfer"
OWN = "sluice.v1.InferenceService"


class Watch:
    """A gateway's observer with a real collector behind it."""

    def __init__(self) -> None:
        self.collector = Collector()
        self.metrics = Metrics("gateway", "g0")
        self.tracer = Tracer.create({"service.instance.id": "g0"}, self.collector.endpoint, TraceSampling(0.0, 1000.0))
        self.observer = GatewayObserver(self.tracer, self.metrics, self.keep)

    def keep(self, envelope: Envelope) -> None:
        """Does nothing: no spans are kept here."""

    def refusals(self) -> dict[str, float]:
        samples = [one for one in self.metrics.samples() if one.metric is catalogue.REFUSALS]
        return {one.labels[0]: one.value for one in samples if isinstance(one.value, int | float)}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # ms
    made = Watch()
    yield made
    made.tracer.shutdown()
    made.collector.stop()


Door = Callable[[Rig, Any], Awaitable[object]]


async def converse(rig: Rig, metadata: Any) -> object:  # noqa: ANN401 # grpc's
    async def frames() -> Any:  # noqa: ANN401 # an iterator, for grpc
        yield inference_pb2.ConverseRequest(tag=1, open=inference_pb2.Open(spec=spec()))
        yield inference_pb2.ConverseRequest(tag=2, ping=inference_pb2.Ping())

    return [frame async for frame in rig.stub.Converse(frames(), metadata=metadata)]


def raw(rig: Rig, path: str, data: bytes, metadata: Any) -> Any:  # noqa: ANN401 # grpc's
    call: Any = rig.channel.unary_unary(path)
    return call(data, metadata=metadata)


DOORS: dict[str, tuple[str, str, str, Door]] = {
    "field": (
        f"{OWN}/StreamGenerate",
        "INVALID_ARGUMENT",
        "INVALID_PARAMETER",
        lambda rig, metadata: rig.stub.StreamGenerate(
            stream_request(sampling={"top_p": 9.0}), metadata=metadata
        ).read(),
    ),
    "metadata": (
        f"{OWN}/Generate",
        "INVALID_ARGUMENT",
        "INVALID_PARAMETER",
        lambda rig, metadata: rig.stub.Generate(unary_request(), metadata=(*metadata, ("x-sluice-priority", "x"))),
    ),
    "bytes": (
        f"{OWN}/Tokenize",
        "INVALID_ARGUMENT",
        "INVALID_PARAMETER",
        lambda rig, metadata: raw(rig, f"/{OWN}/Tokenize", b"\xff", metadata),
    ),
    "unbuilt": (
        f"{OWN}/Embed",
        "UNIMPLEMENTED",
        "FEATURE_UNSUPPORTED",
        lambda rig, metadata: rig.stub.Embed(
            inference_pb2.EmbedRequest(pooling=inference_pb2.POOLING_FIRST), metadata=metadata
        ),
    ),
    "stream": (
        f"{OWN}/Converse",
        "INVALID_ARGUMENT",
        "INVALID_PARAMETER",
        lambda rig, metadata: rig.stub.Converse(metadata=(*metadata, ("x-sluice-priority", "x"))).read(),
    ),
    "resume": (
        f"{OWN}/ResumeGenerate",
        "NOT_FOUND",
        "GENERATION_NOT_FOUND",
        lambda rig, metadata: rig.stub.ResumeGenerate(
            inference_pb2.ResumeGenerateRequest(
                spec=types_pb2.GenerationSpec(resume=types_pb2.ResumePoint(generation_id="f" * 32))
            ),
            metadata=metadata,
        ).read(),
    ),
    "open inference": (
        OIP,
        "INVALID_ARGUMENT",
        "INVALID_PARAMETER",
        lambda rig, metadata: raw(
            rig, f"/{OIP}", oip.ModelInferRequest(model_name="toy").SerializeToString(), metadata
        ),
    ),
}


@pytest.mark.parametrize("name", list(DOORS))
async def test_every_door_leaves_a_failed_span_and_a_count(watch: Watch, name: str) -> None:
    method, code, reason, door = DOORS[name]
    async with running(observer=watch.observer) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await door(rig, (("traceparent", f"00-{TRACE}-{SPAN}-00"),))
        assert caught.value.code().name == code and rig.ring.submits == []
    trailers = {key: value for key, value in caught.value.trailing_metadata() or ()}
    spans = {one.name: one for one in watch.collector.wait_for(TRACE, {method, names.SPAN_ADMISSION}, 10)}
    assert set(spans) == {method, names.SPAN_ADMISSION}
    rpc, admission = spans[method], spans[names.SPAN_ADMISSION]
    assert (rpc.parent_id, admission.parent_id) == (SPAN, rpc.span_id)
    assert rpc.attributes[names.RPC_STATUS] == code and rpc.is_error is (code in names.RPC_SERVER_ERRORS)
    assert admission.is_error and admission.attributes[names.ERROR_TYPE] == reason
    assert trailers["x-sluice-trace-id"] == TRACE
    assert trailers["traceresponse"] == f"00-{TRACE}-{rpc.span_id}-01"
    assert watch.refusals() == {reason: 1}


async def test_a_generation_that_a_stream_may_not_open_has_one_too(watch: Watch) -> None:
    async with running(settings(max_stream_generations=0), observer=watch.observer) as rig:
        await converse(rig, (("traceparent", f"00-{TRACE}-{SPAN}-00"),))
    method = f"{OWN}/Converse"
    spans = {one.name: one for one in watch.collector.wait_for(TRACE, {method, names.SPAN_ADMISSION}, 10)}
    assert spans[method].attributes[names.RPC_STATUS] == "RESOURCE_EXHAUSTED"
    assert spans[names.SPAN_ADMISSION].attributes[names.ERROR_TYPE] == "QUEUE_FULL" and len(spans) == 2
    assert watch.refusals() == {"QUEUE_FULL": 1}


async def test_who_may_not_come_in_is_told_of_too(watch: Watch, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(f'[[keys]]\nsha256 = "{digest_of("k").hex()}"\ntenant = "acme"\nscopes = ["generate"]\n')
    parent = ("traceparent", f"00-{TRACE}-{SPAN}-00")
    async with running(settings(access_file=file), observer=watch.observer) as rig:
        for key in ("wrong", "k"):
            with pytest.raises(grpc.aio.AioRpcError):
                await rig.control.GetLoad(
                    control_pb2.GetLoadRequest(), metadata=(parent, ("authorization", f"Bearer {key}"))
                )
    assert watch.refusals() == {"CREDENTIALS_INVALID": 1, "NOT_ALLOWED": 1}
    watch.tracer.shutdown()
    spans = watch.collector.wait_for(TRACE, {"sluice.v1.ControlService/GetLoad"}, 10)
    found = {one.attributes[names.RPC_STATUS] for one in spans if one.name == "sluice.v1.ControlService/GetLoad"}
    assert found == {"UNAUTHENTICATED", "PERMISSION_DENIED"}


def test_a_flood_of_refusals_leaves_room_for_what_was_let_in(watch: Watch) -> None:
    refused = RefusedRequest("Generate", ServiceError(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full"), "", "", "")
    watch.tracer.counts["queued"] = MAX_WAITING
    for _ in range(5):
        assert watch.observer.refused(refused) == ""
    assert watch.tracer.counts["queued"] == MAX_WAITING and watch.refusals() == {"QUEUE_FULL": 5}
    watch.tracer.counts["queued"] = 0
    assert watch.observer.refused(refused).endswith("-01") and watch.tracer.counts["queued"] == 2
