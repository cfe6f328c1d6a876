"""`sluice demo`: runs the whole ring on a small model, with one streamed answer, its figures and its span tree."""

import os
import signal
import subprocess
import sys
import time
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import typer

from sluice_server.services.checkpoint.model_source import DEMO
from sluice_server.services.checkpoint.packaged import HOW, SMOLLM2, smollm2_file
from sluice_server.services.cli.dialogue import UNBOUNDED, check_option
from sluice_server.services.cli.environment import CHECKED

if TYPE_CHECKING:
    from rich.console import Console
    from sluice.v1 import types_pb2

    from sluice_server.services.telemetry.collector import Collector

QUESTION = "Explain in three sentences why the sky is blue."
CODE = 'def fibonacci(n):\n    """Return'  # for the embedded model, which completes Python
SEED = 7
ANSWER_TIMEOUT_S = 120.0
SPANS = {"tokenize", "queue", "prefill", "decode", "detokenize", "sluice.v1.InferenceService/StreamGenerate"}
FALLING_BACK = (
    f"{SMOLLM2} is not installed ({HOW}), so the embedded model runs: 4 million parameters, which "
    "complete Python, badly"
)


def demo(
    prompt: Annotated[str | None, typer.Argument(help="a question, or for the embedded model a beginning")] = None,
    model: Annotated[
        str | None,
        typer.Option(envvar="SLUICE_DEMO_MODEL", help="as of serve; default: smollm2 if installed, else demo"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(envvar="SLUICE_MAX_TOKENS", help="tokens to generate")] = 128,
    temperature: Annotated[float, typer.Option(envvar="SLUICE_TEMPERATURE", help="0 is greedy")] = 0.0,
) -> None:
    """Start everything, stream an answer, show its figures and spans, stop everything."""
    from rich.console import Console

    from sluice_server.services.telemetry.collector import Collector

    console = Console(highlight=False)
    if model is None and smollm2_file() is None:
        console.print(FALLING_BACK, style="yellow", markup=False, soft_wrap=True)
    model = model or (SMOLLM2 if smollm2_file() else DEMO)
    spec = _spec(model, prompt, max_tokens, temperature)
    collector = Collector()
    service = _start(model, collector.endpoint)
    try:
        assert service.stdout is not None
        line = service.stdout.readline()
        if " on " not in line:
            raise typer.Exit(1)  # the service has printed the error on stderr
        console.print(line.strip(), style="dim", markup=False, soft_wrap=True)
        trace_id = token_hex(16)
        console.print(f"\n{prompt or _prompt(model)}", style="bold", markup=False, soft_wrap=True)
        _stream(console, line.split(" on ")[1].split(",")[0], trace_id, spec)
        _memory(console, service.pid)
        _spans(console, collector, trace_id)
        if prompt is None:
            command = sys.argv[0] if sys.argv[0].endswith("sluice") else "sluice"
            next_steps = f"\nnow talk to it: {command} serve --model {model}, and in another terminal: {command} chat"
            console.print(next_steps, markup=False, soft_wrap=True)
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait()
        collector.stop()


def _prompt(model: str) -> str:
    return CODE if model == DEMO else QUESTION


def _spec(model: str, prompt: str | None, max_tokens: int, temperature: float) -> "types_pb2.GenerationSpec":
    """Returns the request. Raises ServiceError naming the flag of a value out of range."""
    import sluice
    from sluice.spec import build

    for name, value in (("max_tokens", max_tokens), ("temperature", temperature)):
        check_option(name, value, UNBOUNDED)
    text = prompt or _prompt(model)
    return build(
        text if model == DEMO else sluice.chat(("user", text)),
        {"max_tokens": max_tokens, "temperature": temperature, "seed": SEED},
    )


def _start(model: str, endpoint: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "sluice_server", "serve", "--model", model, "--listen", "127.0.0.1:0"]
    options = ["--otlp-endpoint", endpoint, "--log-level", "warning"]
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "100", **os.environ, CHECKED: "1"}  # ms: the command waits for the spans
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def _stream(console: "Console", address: str, trace_id: str, spec: "types_pb2.GenerationSpec") -> None:
    """Stream the answer and print TTFT and speed."""
    import grpc
    from sluice.v1 import inference_pb2, inference_pb2_grpc

    request = inference_pb2.StreamGenerateRequest(spec=spec)
    metadata = (("traceparent", f"00-{trace_id}-{token_hex(8)}-01"),)
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        start = first = last = time.perf_counter()
        num_tokens = 0
        try:
            for event in stub.StreamGenerate(request, metadata=metadata, timeout=ANSWER_TIMEOUT_S):
                if event.HasField("delta"):
                    last = time.perf_counter()
                    first = first if num_tokens else last
                    num_tokens += event.delta.consumed
                    console.print(event.delta.text, end="", markup=False, soft_wrap=True)
        except grpc.RpcError as error:
            print(f"error: {error.details()}", file=sys.stderr)
            raise typer.Exit(1) from error
    rate = (num_tokens - 1) / max(last - first, 1e-9)
    console.print(
        f"\n\nTTFT {(first - start) * 1e3:.1f} ms, {rate:.0f} tokens/s, {num_tokens} tokens", style="bold green"
    )


def _memory(console: "Console", supervisor: int) -> None:
    """Print what the processes take."""
    from sluice_server.services.process.process_memory import ring_memory

    found = ring_memory(supervisor)
    parts = ", ".join(f"{name} {num / 2**20:.0f}" for name, num in sorted(found.items()))
    if found:
        console.print(f"memory {sum(found.values()) / 2**20:.0f} MiB ({parts})", style="bold green", soft_wrap=True)


def _spans(console: "Console", collector: "Collector", trace_id: str) -> None:
    """Print the request's span tree."""
    from sluice_server.services.telemetry.tree import tree_lines

    console.print(f"\ntrace {trace_id} (pid {os.getpid()} collected it over OTLP)", style="dim")
    for line in tree_lines(collector.wait_for(trace_id, SPANS, timeout_s=3.0)):
        console.print(line, markup=False)
