"""`sluice demo`: runs the whole ring on the embedded model, with one streamed completion, its figures and its span
tree."""

import os
import signal
import subprocess
import sys
import time
from secrets import token_hex
from typing import Annotated

import typer

from sluice_server.services.cli.environment import CHECKED

PROMPT = 'def fibonacci(n):\n    """Return'
SEED = 7
START_TIMEOUT_S = 30.0
SPANS = {"tokenize", "queue", "prefill", "decode", "detokenize", "sluice.v1.InferenceService/StreamGenerate"}


def demo(
    max_tokens: Annotated[int, typer.Option(envvar="SLUICE_MAX_TOKENS", help="tokens to generate")] = 96,
    temperature: Annotated[float, typer.Option(envvar="SLUICE_TEMPERATURE", help="0 is greedy")] = 0.7,
) -> None:
    """Start everything, stream a completion, show its figures and spans, stop everything."""
    from rich.console import Console

    from sluice_server.services.telemetry.collector import Collector

    console = Console(highlight=False)
    collector = Collector()
    command = [sys.executable, "-m", "sluice_server", "serve", "--model", "demo", "--listen", "127.0.0.1:0"]
    options = ["--otlp-endpoint", collector.endpoint, "--log-level", "warning"]
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "100", **os.environ, CHECKED: "1"}  # ms: the command waits for the spans
    service = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        assert service.stdout is not None
        line = service.stdout.readline()
        if " on " not in line:
            raise typer.Exit(1)  # the service has printed the error on stderr
        console.print(line.strip(), style="dim")
        trace_id = token_hex(16)
        _stream(console, line.split(" on ")[1].split(",")[0], trace_id, max_tokens, temperature)
        _spans(console, collector, trace_id)
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait()
        collector.stop()


def _stream(console: object, address: str, trace_id: str, max_tokens: int, temperature: float) -> None:
    """Stream the completion and print TTFT and speed."""
    import grpc
    from rich.console import Console
    from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

    assert isinstance(console, Console)
    sampling = types_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=SEED)
    request = inference_pb2.StreamGenerateRequest(spec=types_pb2.GenerationSpec(text=PROMPT, sampling=sampling))
    metadata = (("traceparent", f"00-{trace_id}-{token_hex(8)}-01"),)
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        console.print(f"\n{PROMPT}", style="bold", end="", markup=False)
        start = first = last = time.perf_counter()
        num_tokens = 0
        for event in stub.StreamGenerate(request, metadata=metadata, timeout=START_TIMEOUT_S):
            if event.HasField("delta"):
                last = time.perf_counter()
                first = first if num_tokens else last
                num_tokens += event.delta.consumed
                console.print(event.delta.text, end="", markup=False, soft_wrap=True)
    rate = (num_tokens - 1) / max(last - first, 1e-9)
    console.print(
        f"\n\nTTFT {(first - start) * 1e3:.1f} ms, {rate:.0f} tokens/s, {num_tokens} tokens", style="bold green"
    )


def _spans(console: object, collector: object, trace_id: str) -> None:
    """Print the request's span tree."""
    from rich.console import Console

    from sluice_server.services.telemetry.collector import Collector
    from sluice_server.services.telemetry.tree import tree_lines

    assert isinstance(console, Console)
    assert isinstance(collector, Collector)
    console.print(f"\ntrace {trace_id} (pid {os.getpid()} collected it over OTLP)", style="dim")
    for line in tree_lines(collector.wait_for(trace_id, SPANS, timeout_s=3.0)):
        console.print(line, markup=False)
