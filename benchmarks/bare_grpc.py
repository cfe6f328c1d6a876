"""A gRPC server that only writes: measures what a message costs in grpc.aio itself.

    python -m benchmarks.bare_grpc ADDRESS STREAMS INTERVAL_S

Once so many streams are open it writes to all of them every interval, as often as the request's number says.
"""

import asyncio
import sys
from typing import Any

import grpc
import uvloop
from sluice.v1 import inference_pb2

METHOD = "/bare.Server/Stream"
MESSAGE = inference_pb2.StreamGenerateResponse()
MESSAGE.delta.text = " word"
MESSAGE.delta.generation_id = "0" * 32 + ".gateway-0"
MESSAGE.delta.seq = MESSAGE.delta.consumed = MESSAGE.delta.coalesced_steps = 1


async def serve(address: str, num_streams: int, interval_s: float) -> None:
    """Serves until it is killed."""
    due: dict[asyncio.Event, None] = {}
    has_begun = False

    async def stream(request: bytes, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        event = asyncio.Event()
        due[event] = None
        for _ in range(int(request)):
            await event.wait()
            event.clear()
            await context.write(MESSAGE)
        del due[event]

    handler: Any = grpc.unary_stream_rpc_method_handler(
        stream, response_serializer=inference_pb2.StreamGenerateResponse.SerializeToString
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Server", {"Stream": handler}),))
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    while True:
        has_begun = bool(due) and (has_begun or len(due) >= num_streams)
        for event in due if has_begun else ():
            event.set()
        await asyncio.sleep(interval_s)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
