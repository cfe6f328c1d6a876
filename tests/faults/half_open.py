"""A client process that its test freezes: each of its connections has a generation that waits for credit (F6).

    python -m tests.faults.half_open ADDRESS CONNECTIONS

Prints a line when every generation has spent its credit, and then only waits.
"""

import asyncio
import sys

import grpc
from sluice.v1 import inference_pb2, inference_pb2_grpc

from tests.system.service import spec

WINDOW = 4


async def spend(address: str) -> object:
    """Opens a generation and reads until it waits for credit. The returned call and channel must be kept alive."""
    channel = grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))
    stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
    call = stub.Converse()
    wanted = spec([1, 2, 3], 200)
    wanted.credit_window = WINDOW
    await call.write(inference_pb2.ConverseRequest(tag=1, open=inference_pb2.Open(spec=wanted)))
    frame = await call.read()
    while isinstance(frame, inference_pb2.ConverseResponse) and not frame.HasField("throttled"):
        assert not frame.HasField("failed"), frame.failed
        frame = await call.read()
    return call, channel


async def main(address: str, num: int) -> None:
    """Opens all, prints a line, and waits."""
    kept = await asyncio.gather(*(spend(address) for _ in range(num)))
    print("spent", len(kept), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
