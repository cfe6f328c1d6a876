"""Two gateways on one port: each cancels and resumes generations of the other."""

import contextlib

import grpc
import pytest
from sluice.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

from tests.system.service import Service, serve, spec

MAX_CONNECTIONS = 64  # the kernel spreads connections by chance


def channels_of_both(stack: contextlib.ExitStack, service: Service) -> list[grpc.Channel]:
    """A connection to each gateway."""
    found: dict[str, grpc.Channel] = {}
    for number in range(MAX_CONNECTIONS):
        # Connections are told apart by an option, or they would be one.
        options = (("grpc.use_local_subchannel_pool", 1), ("sluice.connection", number))
        channel = stack.enter_context(grpc.insecure_channel(service.address, options=options))
        info = control_pb2_grpc.ControlServiceStub(channel).GetServerInfo(
            control_pb2.GetServerInfoRequest(), timeout=60
        )
        found.setdefault(info.gateway_id, channel)
        if len(found) == 2:
            return list(found.values())
    raise AssertionError("every connection went to one gateway")


def test_a_generation_is_resumed_and_cancelled_through_another_gateway() -> None:
    with serve("--gateways", "2") as service, contextlib.ExitStack() as stack:
        own, other = (inference_pb2_grpc.InferenceServiceStub(one) for one in channels_of_both(stack, service))
        asked = spec("Once upon a time", 120)
        asked.scheduling.on_disconnect = types_pb2.DISCONNECT_ACTION_DETACH
        whole = [event.delta.text for event in own.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=asked))]
        call = own.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=asked))
        generation_id = next(call).accepted.generation_id
        got = next(call).delta  # the first is sent alone; how many there are of the rest depends on the machine's speed
        call.cancel()
        point = types_pb2.ResumePoint(generation_id=generation_id, after_seq=got.seq)
        resumed = other.ResumeGenerate(
            inference_pb2.ResumeGenerateRequest(spec=types_pb2.GenerationSpec(resume=point)), timeout=60
        )
        assert got.text + "".join(event.delta.text for event in resumed) == "".join(whole)

        call = own.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec("a", 1900)))
        request = inference_pb2.CancelGenerationRequest(generation_id=next(call).accepted.generation_id)
        assert other.CancelGeneration(request, timeout=60).found == inference_pb2.GENERATION_STATE_RUNNING
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert isinstance(caught.value, grpc.Call) and caught.value.code() == grpc.StatusCode.CANCELLED
