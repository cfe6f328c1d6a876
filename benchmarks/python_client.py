"""Measures what the Python client adds to a message over bare grpc.aio, and its first call from a cold process.

`python -m benchmarks.python_client`. The server of the first figure is a bare one in a process of its own that writes
deltas made beforehand, so that only the client's side differs; the two take turns, and the median of the differences
counts. The second starts a new interpreter for each call, against a running `sluice serve`, import included.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time

import grpc
import sluice
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from benchmarks.machine import end_as_asked, write
from tests.system.service import serve

NUM_MESSAGES = 20_000
ROUNDS = 7
COLD_CALLS = 9
COLD = """
import time
start = time.perf_counter()
import sluice
with sluice.Client({address!r}) as client:
    client.generate("Hello", max_tokens=1)
print(time.perf_counter() - start)
"""


async def stream(
    request: inference_pb2.StreamGenerateRequest,
    context: "grpc.aio.ServicerContext[inference_pb2.StreamGenerateRequest, inference_pb2.StreamGenerateResponse]",
) -> None:
    """The messages of a stream: accepted, prepared deltas, finished."""
    await context.write(inference_pb2.StreamGenerateResponse(accepted=types_pb2.Accepted(generation_id="g")))
    for seq in range(1, NUM_MESSAGES + 1):
        delta = types_pb2.Delta(generation_id="g", seq=seq, text=" word", consumed=1)
        delta.tokens.add(id=seq % 1000, piece=b" word")
        await context.write(inference_pb2.StreamGenerateResponse(delta=delta))
    await context.write(inference_pb2.StreamGenerateResponse(finished=types_pb2.Finished(last_seq=NUM_MESSAGES)))


async def serve_fake() -> None:
    """Serves until standard input ends."""
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        stream,
        request_deserializer=inference_pb2.StreamGenerateRequest.FromString,
        response_serializer=inference_pb2.StreamGenerateResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler("sluice.v1.InferenceService", {"StreamGenerate": handler})
    server.add_generic_rpc_handlers((service,))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def bare(stub: "inference_pb2_grpc.InferenceServiceAsyncStub") -> float:
    """Microseconds of this process's time per message, with the stub alone."""
    request, start = inference_pb2.StreamGenerateRequest(), time.process_time()
    num = 0
    async for event in stub.StreamGenerate(request):
        num += event.WhichOneof("event") == "delta"
    assert num == NUM_MESSAGES
    return (time.process_time() - start) / num * 1e6


async def ours(client: sluice.AsyncClient) -> float:
    """The same with the client."""
    start, num = time.process_time(), 0
    async for _ in client.stream("x"):
        num += 1
    assert num == NUM_MESSAGES
    return (time.process_time() - start) / num * 1e6


async def per_message(port: int) -> dict[str, float]:
    """Both, alternating."""
    address, found = f"127.0.0.1:{port}", []
    async with grpc.aio.insecure_channel(address) as channel, sluice.AsyncClient(address) as client:
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        await bare(stub)
        await ours(client)
        for _ in range(ROUNDS):
            found.append((await bare(stub), await ours(client)))
    added = statistics.median(mine - theirs for theirs, mine in found)
    raw = statistics.median(theirs for theirs, _ in found)
    return {"bare_us": round(raw, 2), "added_us": round(added, 2)}


def cold_calls(address: str) -> dict[str, float]:
    """Milliseconds from the first line of a program to its first answer."""
    code, found = COLD.format(address=address), []
    for _ in range(COLD_CALLS):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found.append(float(done.stdout) * 1e3)
    return {"first_call_ms": round(statistics.median(found), 1), "fastest_ms": round(min(found), 1)}


def main() -> None:
    """Measure both and write the result."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve-fake", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().serve_fake:
        asyncio.run(serve_fake())
        return
    command = [sys.executable, "-m", "benchmarks.python_client", "--serve-fake"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as fake:
        assert fake.stdout is not None
        figures = asyncio.run(per_message(int(fake.stdout.readline())))
        fake.communicate("")
    with serve("--model", "demo") as service:
        figures |= cold_calls(service.address)
    write("python_client", "python -m benchmarks.python_client", dict(figures))


if __name__ == "__main__":
    main()
