"""Measures `sluice serve --model demo` from a cold start to its first token over gRPC, and its processes' memory.

python -m benchmarks.cold_start [--runs 5]

Memory is that of proportional shares: pages of torch's libraries count less while another process of the machine, of
whatever service, has them too.
"""

import argparse
import signal
import subprocess
import sys
import time

import grpc
import psutil
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from benchmarks.machine import end_as_asked, median, write

COMMAND = (sys.executable, "-m", "sluice_server", "serve", "--listen", "127.0.0.1:0", "--log-level", "warning")


def measure() -> tuple[float, float, float]:
    """Seconds until ready, seconds to the first token, and resident MB (proportional shares) of all processes."""
    start = time.perf_counter()
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        address = service.stdout.readline().split(" on ")[1].split(",")[0]
        ready = time.perf_counter() - start
        with grpc.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            spec = types_pb2.GenerationSpec(text="import os", sampling=types_pb2.SamplingParams(max_tokens=32))
            events = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec))
            next(event for event in events if event.HasField("delta"))
            first = time.perf_counter() - start
            for _ in events:
                pass
        own = psutil.Process(service.pid)
        memory = sum(process.memory_full_info().pss for process in (own, *own.children())) / 1e6
        service.send_signal(signal.SIGTERM)
    return ready, first, memory


def main() -> None:
    """Measures and writes the result."""
    end_as_asked()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    runs = [measure() for _ in range(options.runs)]
    names = ("ready_s", "first_token_s", "memory_mb")
    figures: dict[str, object] = {
        name: {"median": round(median(values), 3), "runs": [round(value, 3) for value in values]}
        for name, values in zip(names, zip(*runs, strict=True), strict=True)
    }
    write("cold_start", f"python -m benchmarks.cold_start --runs {options.runs}", figures)


if __name__ == "__main__":
    main()
