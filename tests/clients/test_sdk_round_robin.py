"""gRPC's own round_robin over several services: with the stubs alone, and below the Python client."""

import grpc
import pytest
import sluice
from sluice.v1 import inference_pb2, inference_pb2_grpc

from tests.conformance.sdks import ROOT
from tests.services.gateway.fake_ring import Rig, generation, running, settings, unary_request

CONFIG = """{
  "loadBalancingConfig": [{"round_robin": {}}],
  "methodConfig": [{
    "name": [{"service": "sluice.v1.InferenceService", "method": "Generate"}],
    "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.05s", "maxBackoff": "1s", "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"]}
  }]
}"""


def answer(*rigs: Rig) -> None:
    for rig in rigs:
        rig.ring.script = lambda submit, rig=rig: rig.ring.play(*generation(submit, ["x"]))  # type: ignore[misc]


def test_the_page_has_the_configuration_that_is_tested() -> None:
    assert CONFIG in (ROOT / "docs/cells.md").read_text()


async def test_calls_take_turns_and_pass_over_a_service_that_is_gone() -> None:
    async with running() as first, running(settings(gateway_id="g1")) as second:
        answer(first, second)
        target = f"ipv4:127.0.0.1:{first.port},127.0.0.1:{second.port}"
        async with grpc.aio.insecure_channel(target, options=[("grpc.service_config", CONFIG)]) as channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)

            async def ask(num: int) -> None:
                for _ in range(num):
                    found: inference_pb2.GenerateResponse = await stub.Generate(unary_request(), timeout=20)
                    assert found.outputs[0].text == "x"

            await ask(1)  # connects to one; the other connection may come later
            await first.ring.until(lambda: channel.get_state() is grpc.ChannelConnectivity.READY)
            await ask(20)
            assert min(len(first.ring.submits), len(second.ring.submits)) > 1
            await first.gateway.stop(0.0)
            await ask(4)


@pytest.mark.parametrize("scheme", ["ipv4:", ""])
async def test_the_client_spreads_calls_over_the_addresses_of_a_name(scheme: str) -> None:
    async with running() as first, running(settings(gateway_id="g1")) as second:
        answer(first, second)
        addresses = [f"127.0.0.1:{rig.port}" for rig in (first, second)]
        target: list[str] | str = addresses if not scheme else scheme + ",".join(addresses)
        async with sluice.AsyncClient(target, channels=1) as client:
            for _ in range(20):
                await client.generate("hello")
        assert min(len(first.ring.submits), len(second.ring.submits)) > 1
