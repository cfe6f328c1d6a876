"""A real service for tests: `sluice serve` on a free port, and typed stubs for it."""

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO

import grpc
import psutil
from sluice.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

TEMPLATE = "template-"  # how their titles begin
START_TIMEOUT_S = 180.0  # four ranks take 16 s of CPU time, and a busy machine gives them a tenth of it


@dataclasses.dataclass
class Service:
    """A running `sluice serve`."""

    process: "subprocess.Popen[str]"
    address: str
    http: str = ""  # the base URL of its edges

    def children(self) -> dict[str, psutil.Process]:
        """Its ring processes by id, from their titles."""
        return {name: child for name, child in self.titled().items() if not name.startswith(TEMPLATE)}

    def templates(self) -> dict[str, psutil.Process]:
        """What its processes are forked from, by their kind."""
        found = self.titled().items()
        return {name.removeprefix(TEMPLATE): child for name, child in found if name.startswith(TEMPLATE)}

    def titled(self) -> dict[str, psutil.Process]:
        """Its processes by their titles."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                found[" ".join(child.cmdline()).removeprefix("sluice: ").strip()] = child
        return found

    @contextlib.contextmanager
    def stub(self) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
        """A blocking client on a channel of its own."""
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
        with grpc.insecure_channel(self.address, options=options) as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    @contextlib.contextmanager
    def control(self) -> Iterator[control_pb2_grpc.ControlServiceStub]:
        """A blocking control client."""
        with grpc.insecure_channel(self.address) as channel:
            yield control_pb2_grpc.ControlServiceStub(channel)

    def num_running(self) -> int:
        """Requests that its engines work on, as they last reported."""
        with self.control() as control:
            return sum(one.running_requests for one in control.GetLoad(control_pb2.GetLoadRequest()).load.engines)


@contextlib.contextmanager
def serve(
    *options: str,
    environment: dict[str, str] | None = None,
    log: IO[str] | None = None,
    within: Sequence[str] = (),
) -> Iterator[Service]:
    """Runs a service until the block ends; it must then exit in time, with status 0 unless it was broken. Its lines for
    operators go to `log`. `within`: what its command is run by."""
    command = [
        *within,
        sys.executable,
        "-m",
        "sluice_server",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--log-level",
        "warning",
    ]
    process = subprocess.Popen(
        [*command, "--threads", "1", *options],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **(environment or {})},
        start_new_session=True,
    )
    try:
        yield Service(process, *_addresses(process))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            if process.stdout:
                process.stdout.close()
            process.wait()


def spec(prompt: str | list[int], num: int = 16, **sampling: float) -> types_pb2.GenerationSpec:
    """A greedy request for `num` tokens, end-of-sequence ignored."""
    params = types_pb2.SamplingParams(max_tokens=num, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type] # mixed
    result = types_pb2.GenerationSpec(sampling=params, stop=types_pb2.StopConditions(ignore_eos=True))
    if isinstance(prompt, str):
        result.text = prompt
    else:
        result.token_ids.ids.extend(prompt)
    return result


def generate(stub: inference_pb2_grpc.InferenceServiceStub, wanted: types_pb2.GenerationSpec) -> types_pb2.Output:
    """One unary generation."""
    return stub.Generate(inference_pb2.GenerateRequest(spec=wanted), timeout=60).outputs[0]


def wait_until(condition: "object", timeout_s: float, what: str) -> float:
    """Poll a callable until it is true; the seconds it took. Fails with `what` when it stays false."""
    assert callable(condition)
    start = time.monotonic()
    with selectors.DefaultSelector() as pause:
        while not condition():
            assert time.monotonic() - start < timeout_s, what
            pause.select(0.01)
    return time.monotonic() - start


def _addresses(process: "subprocess.Popen[str]") -> list[str]:
    """Reads the ready line; the address of gRPC, and the URL of HTTP if it is served."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(START_TIMEOUT_S), "the service did not become ready"
    line = process.stdout.readline()
    assert " on " in line, f"the service said {line!r} instead of becoming ready"
    return [one.split(",")[0] for one in line.split(" on ")[1:]]
