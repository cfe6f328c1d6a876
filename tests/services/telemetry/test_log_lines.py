"""Every log call of the services names its request, or is in the table of calls without a request."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from sluice.v1 import inference_pb2

from sluice_server.services import faults
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.calls import converse as converse_calls
from sluice_server.services.gateway.generation.converse import ConverseSession
from sluice_server.services.telemetry import logs
from tests.services.gateway.fake_ring import running, spec

SERVICES = Path(logs.__file__).parents[1]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
LOGGERS = {"log", "logger"}
TRACE = "ab" * 16
PARENT = (("traceparent", f"00-{TRACE}-{'cd' * 8}-01"),)

# About a process, a file, a connection to others: no request has a part in them.
OF_NO_REQUEST = {
    ("engine/block_sources.py", "no cache blocks are shared: cannot listen on %s: %s"),
    ("transfer/carrier.py", "no cache blocks are fetched from %s: %s"),
    ("transfer/network.py", "no cache blocks are fetched from %s: %s"),
    ("transfer/direct_reads.py", "blocks of %s are not read: %s; their tokens will be computed again"),
    ("transfer/direct_reads.py", "blocks of %s do not come: %s; their tokens will be computed again"),
    ("transfer/direct_reads.py", "a transfer that has ended is not released: %s"),
    ("transfer/direct_reads.py", "%s was not known any more: %s"),
    (
        "engine/block_sources.py",
        "NIXL authenticates nobody: who reaches its port can read this process's memory and write to it",
    ),
    ("ranks/process.py", "rank %d of %d computes"),
    ("ranks/process.py", "this rank ends with its group: %s"),
    ("engine/process.py", "this rank ends with its group: %s"),
    ("ranks/devices.py", "this GPU does not map the memory of the other ranks': sums go over NCCL (%s)"),
    ("ranks/devices.py", "what GPUs read of one another is not what was written: sums go over NCCL; %s=1 says so"),
    ("ranks/devices.py", "rank %d reads small sums from the memory of the other GPUs"),
    ("ranks/network.py", "partial sums travel as %s, unencrypted, between %s"),
    ("ranks/leader.py", "a message of a rank was dropped: %s"),
    ("ranks/leader.py", "waiting for rank %s %s"),
    ("ranks/leader.py", "rank %s did not save its part of the cache"),
    (
        "engine/cache_operations.py",
        "the cache has %d tokens (before: %d), and %d bytes of its host tier (before: %d)",
    ),
    ("launch/keeper.py", "%s ended (%s); starting it again"),
    ("launch/keeper.py", "%s was stuck for %.1f s"),
    ("launch/ray_ring.py", "the keeper of %s is lost (%s); making another"),
    ("launch/ray_ring.py", "%s; trying again"),
    ("launch/ray_ring.py", "%s moved to another machine: the ring is formed anew"),
    ("kvstore/pool.py", "%s; such blocks are computed again"),
    ("kvstore/server.py", "an engine is refused: %s"),
    ("transfer/store_link.py", "no cache blocks are fetched from %s: %s"),
    ("engine/cache_operations.py", "cleared %d blocks of %s from the cache"),
    ("edge/protocol.py", "the edge failed at a request's head"),
    ("memory/watch.py", "looking after the memory failed"),
    ("process/beats.py", "a beat failed, and is the last of its ring"),
    (
        "engine/gpus.py",
        "memory of the GPU is short: %d MiB are free, %d MiB were at the start; steps compute fewer tokens",
    ),
    ("engine/gpus.py", "the GPU's use and energy are not measured: no %s (pip install sluice-server[nvml])"),
    ("engine/gpus.py", "the GPU's use and energy are not measured: %s"),
    ("engine/traffic.py", "what the block size is chosen by is not kept: %s"),
    ("faults.py", "%s failed in a %s"),
    ("profiles/recording.py", "recording a profile (%s) for %g s at most"),
    ("gateway/lane_reports.py", "serving revision %s on %s"),
    ("gateway/lanes.py", "the model %s cannot be served: %s"),
    ("gateway/opening.py", "%s"),
    ("gateway/recovery/agreement.py", "requests are of revision %s from now on%s"),
    ("gateway/recovery/agreement.py", "%s gets no requests: %s"),
    ("process/joining.py", "the engines are %s from now on"),
    ("process/joining.py", "%s; the engines without a key get no requests from here"),
    ("process/joining.py", "%s was replaced since this process read it, and others serve another revision: ending"),
    ("checkpoint/digests.py", "<text>"),
    ("gateway/connections/listener.py", "the gRPC server %s; another one takes its place"),
    (
        "gateway/connections/acceptor.py",
        "grpcio %s has no %s: a path that is not UTF-8 stops its server until another is there, and calls that are "
        "reset as they begin go unnoticed; install 1.85.1",
    ),
    (
        "gateway/connections/floods.py",
        "connections were cut that reset their calls as they began, or were too many: %s",
    ),
    ("gateway/connections/floods.py", "looking after the connections failed"),
    ("gateway/connections/listener.py", "a gRPC server that had stopped by itself reports it again"),
    ("telemetry/queue.py", "spans do not reach the collector: until they do they are dropped and counted"),
    ("telemetry/queue.py", "%d spans cannot be sent"),
    ("process/watched.py", "%s; the one read before stays in force"),
    ("process/watched.py", "%s was read again"),
    ("engine/process.py", "loaded %s on %s in %s (%s kernels) with %d cache blocks in %s in %.2f s"),
    ("engine/process.py", "computing %s on %d threads (%s) with %s"),
    ("engine/process.py", "computing on %d threads from now on (%s)"),
    ("engine/process.py", "<note>"),
    ("checkpoint/grammar_ids.py", "no constrained output with %s: %s"),
    ("ring/loop.py", "%s cannot go on"),
    ("ring/loop.py", "%s listens again: the file of its socket was gone"),
    ("ring/sockets.py", "a frame of %s is dropped: its clock is more than a day ahead of this one"),
    ("ring/request_ends.py", "%s could not handle a %s"),
    ("ring/loop.py", "frames of %s are refused: %s"),
    ("gateway/recovery/watch.py", "%s: no probe comes back; other engines take over"),
}


def calls() -> Iterator[tuple[str, str, bool]]:
    """File, message, and whether it names its subject, of every log call."""
    for path in sorted(SERVICES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id in LOGGERS:
                first = node.args[0]
                text = str(first.value) if isinstance(first, ast.Constant) else f"<{ast.unparse(first)}>"
                about = any(word.arg == "extra" for word in node.keywords)
                yield str(path.relative_to(SERVICES)), text, about


def test_a_line_says_what_it_is_about_or_is_about_no_request() -> None:
    found = list(calls())
    assert {(path, text) for path, text, is_about in found if not is_about} == OF_NO_REQUEST
    assert len(found) > len(OF_NO_REQUEST)


def test_loggers_have_the_names_that_the_walk_knows() -> None:
    made = [path for path in SERVICES.rglob("*.py") if "= logging.getLogger(__name__)\n" in path.read_text()]
    known = {SERVICES / path for path, _, _ in calls()}
    assert set(made) <= known, "a module has a logger under another name, or one that it never uses"


def about(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    (record,) = [one for one in caplog.records if one.name == faults.__name__]
    found = vars(record)[logs.FIELDS]
    assert isinstance(found, dict)
    return found


async def failing(monkeypatch: pytest.MonkeyPatch, method: str) -> str:
    """The generation that was open on a stream when `method` of its session raised."""
    async with running() as rig:
        call = rig.stub.Converse(metadata=PARENT)
        await call.write(inference_pb2.ConverseRequest(tag=1, open=inference_pb2.Open(spec=spec())))
        name = (await rig.ring.next_submit()).envelope.request_id

        def broken(*arguments: object) -> None:
            raise ValueError("bad")

        monkeypatch.setattr(ConverseSession, method, broken)
        await call.write(inference_pb2.ConverseRequest(tag=2, open=inference_pb2.Open(spec=spec())))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        return name


@pytest.mark.parametrize("method", ["open", "next"])
async def test_a_broken_stream_names_its_trace_and_its_requests(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with caplog.at_level(logging.ERROR):
        name = await failing(monkeypatch, method)
    found = about(caplog)
    assert found["trace_id"] == TRACE
    assert found["requests"] == [{"request_id": name, "trace_id": TRACE}]


async def test_a_stream_that_cannot_be_begun_names_its_trace(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> CallMetadata:
        raise ValueError("bad")

    monkeypatch.setattr(converse_calls, "read_call", broken)
    with caplog.at_level(logging.ERROR):
        async with running() as rig:
            with pytest.raises(grpc.aio.AioRpcError):
                await rig.stub.Converse(metadata=PARENT).read()
    assert about(caplog) == {"trace_id": TRACE, "role": "gateway"}
