"""Tests the compose stack on a real Docker daemon: `make test-compose`.

Builds the images, starts the stack, streams through it, kills containers, reads metrics and traces, and removes the
stack. BASE_IMAGE and PIP_NO_INDEX are passed to the build. Prints its observations line by line; exit status 1 at the
first failure.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice_server.services.telemetry.collector import Collector
from tools.generations import Check, Interrupted, channel, say, stream

ROOT = Path(__file__).parents[1]
PROJECT = "sluice-check"
PORT = "50951"
ADDRESS = f"127.0.0.1:{PORT}"
ROLES = ("gateway", "tokenizer", "engine", "detokenizer")
COMMAND_S = 1800.0  # limit of one command; a build takes longest
MAX_TEXT_MB = 120.0  # above the base image
MAX_FIRST_TOKEN_S = 20.0
NUM_TOKENS = 1900
SPANS = {"tokenize", "queue", "prefill", "decode", "detokenize", "text_completion demo"}
METRICS_OF = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9464/metrics').read().decode())"


PACKAGES = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
OURS = ("sluice-server", "sluice-client")
TORCH = ("torch", "triton", "numpy", "safetensors")  # torch and its companions: only in the engine's image


def run(*command: str, **environment: str) -> str:
    """Run a command and return its output. Raises Check if it fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}, timeout=COMMAND_S
        )
    except subprocess.TimeoutExpired:
        raise Check(f"{' '.join(command)}: not done after {COMMAND_S:.0f} s") from None
    if done.returncode:
        raise Check(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout


class Stack:
    """The compose project under test."""

    def __init__(self, collector: Collector) -> None:
        self._environment = {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "SLUICE_PORT": PORT,
            "SLUICE_TEXT_IMAGE": "sluice-text:check",
            "SLUICE_ENGINE_IMAGE": "sluice-engine:check",
        }
        has_plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
        self._compose = ("docker", "compose") if has_plugin else ("docker-compose",)
        self._collector = collector

    def compose(self, *arguments: str) -> str:
        """Run a compose command and return its output."""
        return run(*self._compose, *arguments, **self._environment)

    def build(self) -> None:
        """Build both images, and check how much the one without torch adds to its base."""
        base = os.environ.get("BASE_IMAGE", "python:3.11.14-slim-bookworm")
        arguments = [
            "--build-arg",
            f"BASE_IMAGE={base}",
            "--build-arg",
            f"PIP_NO_INDEX={os.environ.get('PIP_NO_INDEX', '')}",
        ]
        for target in ("text", "engine"):
            start = time.monotonic()
            image = f"sluice-{target}:check"
            run("docker", "build", "--network", "host", "--target", target, "-t", image, *arguments, ".")
            more = (size_of(image) - size_of(base)) / 1e6
            say(f"built {image} in {time.monotonic() - start:.0f} s: {more:.0f} MB above {base}")
            if target == "text" and more > MAX_TEXT_MB:
                raise Check(f"{image} is {more:.0f} MB above its base, at most {MAX_TEXT_MB:.0f} were to be")

    def up(self) -> None:
        """Start the stack. Containers send their spans to this process's collector, at the host's address in their
        network."""
        self.compose("up", "--no-start", "keys")  # creates the networks
        networks = json.loads(run("docker", "network", "inspect", f"{PROJECT}_ring"))
        host = networks[0]["IPAM"]["Config"][0]["Gateway"]
        self._environment["SLUICE_OTLP_ENDPOINT"] = f"http://{host}:{self._collector.port}"
        self.compose("up", "-d")

    def container(self, role: str) -> str:
        """Returns the id of a role's container."""
        return self.compose("ps", "-q", role).strip()

    def metrics(self, role: str) -> str:
        """Returns the Prometheus page of a role."""
        return run("docker", "exec", self.container(role), "python3", "-c", METRICS_OF)

    def kill(self, role: str) -> None:
        """Kill a role's container and start it again."""
        run("docker", "restart", "--time", "0", self.container(role))

    def down(self) -> None:
        """Remove the stack, volumes included."""
        self.compose("down", "-v", "-t", "15")


def size_of(image: str) -> int:
    """Returns the bytes of an image."""
    return int(run("docker", "image", "inspect", "--format", "{{.Size}}", image))


def wait_until_served(timeout_s: float) -> float:
    """Wait for the first token. Returns the seconds it took."""
    start = time.monotonic()
    while time.monotonic() - start < timeout_s:
        with channel(ADDRESS) as opened:
            try:
                stub = health_pb2_grpc.HealthStub(opened)
                if stub.Check(health_pb2.HealthCheckRequest(), timeout=2).status == 1:
                    stream(ADDRESS, 1)
                    return time.monotonic() - start
            except grpc.RpcError:
                pass
        time.sleep(0.1)
    raise Check(f"nothing served within {timeout_s:.0f} s")


def check_packages() -> None:
    """Check the packages of each image: every version is the pinned one, and the text roles have no torch."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {canonical(name): version.split()[0] for name, version in pins.items()}
    for target in ("text", "engine"):
        image = f"sluice-{target}:check"
        shown = run("docker", "run", "--rm", "--entrypoint", "python3", image, "-c", PACKAGES).split()
        found = {canonical(name): version for name, version in (one.split("==") for one in shown)}
        for name, version in found.items():
            if name not in OURS and pinned.get(name) != version.split("+")[0]:  # torch's local version names its build
                raise Check(f"{image} has {name} {version}, and constraints.txt {pinned.get(name, 'none')}")
        if target == "text" and found.keys() & set(TORCH):
            raise Check(f"{image} has {sorted(found.keys() & set(TORCH))}")
        say(f"{image} lists {len(found)} packages, all of them as pinned")


def canonical(name: str) -> str:
    """Returns the normalized name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check_locks(stack: Stack) -> None:
    """Check that no container runs as root, and that the image's files are read-only."""
    for role in ROLES:
        name = stack.container(role)
        if run("docker", "exec", name, "id", "-u").strip() != "10001":
            raise Check(f"{role} runs as another user")
        try:
            run("docker", "exec", name, "touch", "/opt/x")
        except Check:
            continue
        raise Check(f"{role} could write to its root")
    say("every role runs as 10001 on a read-only root")


def check_kills(stack: Stack, whole: str) -> None:
    """Check that streams survive the death of each process behind the gateway, but not that of the gateway."""
    for role in ("detokenizer", "tokenizer", "engine"):
        say(f"killing the {role} in mid-stream")
        if Interrupted(ADDRESS, NUM_TOKENS, functools.partial(stack.kill, role)).text() != whole:
            raise Check(f"the text changed when the {role} was killed")
        wait_until_served(60)
    say("killing the gateway in mid-stream")
    try:
        Interrupted(ADDRESS, NUM_TOKENS, functools.partial(stack.kill, "gateway")).text()
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise Check(f"the stream ended with {error.code().name}") from error
        say("the stream ended with UNAVAILABLE, as its connection broke")
    else:
        raise Check("the stream outlived its gateway")
    say(f"serving again after {wait_until_served(60):.1f} s")


def check_telemetry(stack: Stack, collector: Collector, trace_id: str) -> None:
    """Check the metrics of all roles, and one trace across them."""
    for role, name in {
        "gateway": "gen_ai_server_time_to_first_token_seconds_count",
        "tokenizer": "sluice_ring_in_total",
        "engine": "sluice_engine_steps_total",
        "detokenizer": "sluice_ring_lag_seconds_count",
    }.items():
        lines = [line for line in stack.metrics(role).splitlines() if line.startswith(name)]
        if not any(float(line.rsplit(" ", 1)[1]) > 0 for line in lines):
            raise Check(f"the {role} shows no {name}")
    spans = collector.wait_for(trace_id, SPANS, 15)
    processes = {span.process for span in spans}
    if not {span.name for span in spans} >= SPANS or len(processes) != len(ROLES):
        raise Check(f"of the trace only {sorted(span.name for span in spans)} came")
    say(f"metrics of {len(ROLES)} roles read; one trace of {len(spans)} spans from {len(processes)} containers")


def check(stack: Stack, collector: Collector) -> None:
    """Run all checks of the running stack, in order."""
    start = time.monotonic()
    stack.up()
    wait_until_served(180)
    took_s = time.monotonic() - start
    say(f"first token {took_s:.1f} s after up began")
    check_locks(stack)
    trace_id = secrets.token_hex(16)
    whole = stream(ADDRESS, NUM_TOKENS, trace_id)
    check_telemetry(stack, collector, trace_id)
    check_kills(stack, whole)
    if took_s > MAX_FIRST_TOKEN_S:
        raise Check(f"the first token took {took_s:.1f} s, at most {MAX_FIRST_TOKEN_S:.0f} were to be")


def main() -> int:
    """Run everything. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--no-build", action="store_true", help="take sluice-text:check and sluice-engine:check as they are"
    )
    arguments = parser.parse_args()
    if shutil.which("docker") is None:
        say("no docker here")
        return 1
    collector = Collector("0.0.0.0")  # containers reach it at the gateway of their network
    stack = Stack(collector)
    try:
        if not arguments.no_build:
            stack.build()
        check_packages()
        check(stack, collector)
    except (Check, grpc.RpcError) as wrong:
        say(f"FAILED: {wrong}")
        with contextlib.suppress(Check):
            say(stack.compose("logs", "--tail", "20"))
        return 1
    finally:
        with contextlib.suppress(Check):
            stack.down()
        collector.stop()
    say("the compose stack works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
