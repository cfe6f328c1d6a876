"""Where requests go and why: sessions by a header, and the reasons in WatchLoad and in `sluice top`."""

from collections.abc import Set

import grpc
import msgspec
import pytest
from rich.console import Console
from sluice.v1 import control_pb2

from sluice_server.services.cli.top import view
from sluice_server.services.config import KV_COST
from sluice_server.services.messages.details import Load, Routed, RoutingReason
from sluice_server.services.messages.processes import Report
from sluice_server.services.process.engine_table import EngineEntry
from sluice_server.services.telemetry import names
from sluice_server.services.telemetry.observed import RequestUsage
from sluice_server.services.telemetry.observer import _used
from tests.services.gateway.fake_ring import Rig, generation, running, settings, text_of, unary_request

THREE = settings(stages=(("t0",), ("e0", "e1", "e2"), ("d0",)), routing=KV_COST, probe_timeout_s=0.2)


async def whole(rig: Rig) -> None:
    await rig.ring.until(lambda: rig.lane.manager.engines.is_whole)
    for name in ("e0", "e1", "e2"):
        rig.lane.handle(Report(name, 1, Load(), served_token=True))


async def load_of(rig: Rig) -> control_pb2.Load:
    return (await rig.control.GetLoad(control_pb2.GetLoadRequest())).load


def shown(load: control_pb2.Load) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(view("here", load, None, 1.0))
    return captured.get()


async def test_requests_of_a_session_go_to_one_engine() -> None:
    async with running(THREE) as rig:
        await whole(rig)
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a"]))
        went: dict[str, Set[str]] = {}
        for turn in range(12):
            session = f"talk {turn % 6}"
            await rig.stub.Generate(unary_request(), metadata=(("x-sluice-session", session),))
            submit = rig.ring.submits[-1]
            assert submit.able == ()
            went[session] = {*went.get(session, ()), submit.envelope.engine}
        assert all(len(engines) == 1 for engines in went.values())
        assert len(set.union(*map(set, went.values()))) > 1
        assert sum(one.routed["session"] for one in (await load_of(rig)).engines) == 12


@pytest.mark.parametrize("values", [("",), ("x" * 129,), ("a", "b")])
async def test_a_session_that_is_none_is_refused(values: tuple[str, ...]) -> None:
    async with running(THREE) as rig:
        with pytest.raises(grpc.aio.AioRpcError, match="x-sluice-session") as refused:
            await rig.stub.Generate(unary_request(), metadata=tuple(("x-sluice-session", one) for one in values))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_load_says_why_engines_get_requests_and_why_not() -> None:
    async with running(THREE) as rig:
        await whole(rig)
        routed = Routed(RoutingReason.CACHE, num_cached=64, num_waiting=7)
        rig.ring.script = lambda submit: rig.ring.play(
            text_of(
                msgspec.structs.replace(submit, envelope=msgspec.structs.replace(submit.envelope, engine="e2")),
                *(0, "a"),
                first=True,
                last=True,
                routed=routed,
            )
        )
        await rig.stub.Generate(unary_request())
        entries = {name: EngineEntry(f"ipc:///{name}", name == "e1") for name in ("e0", "e1", "e2")}
        rig.lane.change_engines(entries)
        rig.ring.silent.add("e0")
        rig.lane.lost({"e0"})
        rig.lane.manager.engines.refused["e0"] = "other weights"
        load = await load_of(rig)
        assert [dict(one.routed) for one in load.engines] == [{}, {}, {"cache": 1}]
        assert [(one.state, one.refusal) for one in load.engines] == [
            (control_pb2.ENGINE_STATE_NOT_SERVING, "other weights"),
            (control_pb2.ENGINE_STATE_DRAINING, ""),
            (control_pb2.ENGINE_STATE_SERVING, ""),
        ]
        lines = shown(load)
        assert "e0 (refused: other weights)" in lines and "e1 (draining)" in lines and "cache 1" in lines


def test_the_span_of_a_request_says_its_engine_and_why() -> None:
    used = RequestUsage(engine="e2", routed=Routed(RoutingReason.CACHE, num_cached=64))
    said = _used(used, 0.1)
    assert (said[names.ENGINE], said[names.ROUTING], said[names.NUM_EXPECTED]) == ("e2", "cache", 64)
    assert names.ENGINE not in _used(RequestUsage(), 0.1)
