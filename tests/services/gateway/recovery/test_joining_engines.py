"""Engines that join a ring at run time, drain and leave: who gets requests, what moves, and who may not join."""

import dataclasses
from collections.abc import Set
from typing import Any

import pytest

from sluice_server.services.config import KV_COST
from sluice_server.services.messages.details import CachedBlock, Load
from sluice_server.services.messages.messages import Cancel, Submit
from sluice_server.services.messages.processes import CacheChanges, Probe, Report, Role
from sluice_server.services.process.engine_table import EngineEntry
from tests.services.gateway.fake_ring import Rig, generation, is_warm_up, running, settings, stream_request, text_of

TWO = settings(stages=(("t0",), ("e0", "e1"), ("d0",)), probe_timeout_s=0.2)


def change(rig: Rig, *names: str, draining: Set[str] = frozenset()) -> None:
    """What the file of the engines says from now on."""
    rig.lane.change_engines({name: EngineEntry(f"ipc:///{name}", name in draining) for name in names})


async def whole(rig: Rig) -> None:
    await rig.ring.until(lambda: rig.lane.manager.engines.is_whole)


async def streams(rig: Rig, num: int) -> list[Any]:
    """Starts so many streams, brings the first token of each, and returns the calls in the order of the submits."""
    calls = []
    for at in range(len(rig.ring.submits) + 1, len(rig.ring.submits) + num + 1):
        calls.append(rig.stub.StreamGenerate(stream_request()))
        await rig.ring.until(lambda at=at: len(rig.ring.submits) == at)  # type: ignore[misc] # a default
        rig.ring.play(text_of(rig.ring.submits[-1], 0, "a", first=True))
    return calls


async def test_an_engine_that_joins_gets_requests_after_a_token() -> None:
    async with running(TWO) as rig:
        await whole(rig)
        rig.ring.silent.add("e2")
        change(rig, "e0", "e1", "e2")
        assert rig.gateway.is_serving and not rig.lane.manager.engines.is_whole
        await streams(rig, 3)
        assert {one.envelope.engine for one in rig.ring.submits} == {"e0", "e1"}
        rig.ring.silent.clear()
        await whole(rig)
        warmed = [one.envelope.engine for one in rig.ring.emitted if isinstance(one, Submit) and is_warm_up(one)]
        assert sorted(warmed) == ["e0", "e1", "e2"]
        await streams(rig, 1)
        assert rig.ring.submits[-1].envelope.engine == "e2"


@pytest.mark.parametrize("routing", [TWO.routing, KV_COST])
async def test_an_engine_that_drains_gets_no_new_requests_and_keeps_its_own(routing: str) -> None:
    told: list[tuple[Set[str], Set[str]]] = []
    async with running(dataclasses.replace(TWO, routing=routing)) as rig:
        await whole(rig)
        rig.lane.on_engines = lambda serving, drained: told.append((serving, drained))
        calls = await streams(rig, 2)
        (own,) = [one for one in rig.ring.submits if one.envelope.engine == "e1"]
        change(rig, "e0", "e1", draining={"e1"})
        await streams(rig, 2)
        assert {one.envelope.engine for one in rig.ring.submits[2:]} == {"e0"}
        assert not any(one.able for one in rig.ring.submits[2:])
        assert not rig.lane.watch.drained
        rig.ring.play(text_of(own, 1, "b", last=True))
        async for _ in calls[rig.ring.submits.index(own)]:
            pass
        await rig.ring.until(lambda: told and told[-1] == ({"e0", "e1"}, {"e1"}))
        assert not [one for one in rig.ring.emitted if isinstance(one, Cancel)]


async def test_without_another_engine_one_that_drains_serves_on() -> None:
    async with running(TWO) as rig:
        await whole(rig)
        change(rig, "e0", "e1", draining={"e1"})
        rig.ring.silent.add("e0")
        rig.lane.lost({"e0"})
        await streams(rig, 1)
        assert rig.ring.submits[-1].envelope.engine == "e1"


async def test_what_an_engine_that_leaves_has_not_finished_goes_on_at_others() -> None:
    async with running(TWO) as rig:
        await whole(rig)
        calls = await streams(rig, 2)
        (moved,) = [one for one in rig.ring.submits if one.envelope.engine == "e1"]
        for _ in range(3):  # however often: nobody is to blame
            change(rig, "e0")
            change(rig, "e0", "e1")
            await whole(rig)
        again = rig.ring.submits[-1].envelope
        assert (again.request_id, again.engine, again.attempt) == (moved.envelope.request_id, "e0", 1)
        assert rig.gateway.is_serving and len(rig.ring.submits) == 3
        rig.ring.play(text_of(rig.ring.submits[-1], 1, "b", last=True))
        events = [event async for event in calls[rig.ring.submits.index(moved)]]
        assert "".join(event.delta.text for event in events if event.WhichOneof("event") == "delta") == "ab"


async def test_requests_wait_where_the_last_engine_left_and_another_joins() -> None:
    async with running(settings(probe_timeout_s=0.2)) as rig:
        calls = await streams(rig, 1)
        rig.ring.silent.add("e1")
        change(rig, "e1")
        calls.append(rig.stub.StreamGenerate(stream_request()))  # held, not refused
        assert rig.gateway.is_serving
        await rig.ring.until(lambda: len(rig.lane.manager.requests) == 2)
        rig.ring.silent.clear()
        await rig.ring.until(lambda: len(rig.ring.submits) == 3)
        assert {one.envelope.engine for one in rig.ring.submits[1:]} == {"e1"}
        rig.ring.play(text_of(rig.ring.submits[1], 1, "b", last=True))
        rig.ring.play(*generation(rig.ring.submits[2], ["c"]))
        for call in calls:
            async for _ in call:
                pass


async def test_an_engine_of_another_revision_does_not_serve_and_disturbs_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(TWO) as rig:
        await whole(rig)
        rig.ring.of_processes["e2"] = "r2"
        change(rig, "e0", "e1", "e2")
        await rig.ring.until(lambda: any(isinstance(one, Probe) and one.is_mixed for one in rig.ring.emitted))
        rig.lane.lost({"e1"})  # it comes back, though e2 never agrees
        await rig.ring.until(lambda: rig.lane.manager.engines.serving == {"e0", "e1"})
        assert rig.gateway.is_serving
        assert sum("e2 gets no requests" in record.message for record in caplog.records) >= 1
        rig.ring.of_processes.clear()
        await whole(rig)


async def test_an_engine_that_computes_otherwise_does_not_serve(caplog: pytest.LogCaptureFixture) -> None:
    async with running(TWO) as rig:
        rig.ring.identities = {"e0": "a", "e1": "a", "e2": "b"}
        await whole(rig)
        rig.ring.emitted.clear()
        change(rig, "e0", "e1", "e2")
        await rig.ring.until(lambda: sum("e2" in one.route for one in rig.ring.emitted if isinstance(one, Probe)) > 3)
        assert rig.lane.manager.engines.serving == {"e0", "e1"}
        (told,) = [record.message for record in caplog.records if "e2 gets no requests" in record.message]
        assert "are not those of e0" in told
        rig.ring.identities["e2"] = "a"
        await whole(rig)


async def test_what_an_unknown_engine_says_is_not_taken() -> None:
    async with running(dataclasses.replace(TWO, routing=KV_COST, kv_events=True)) as rig:
        await whole(rig)
        rig.ring.emitted.clear()
        for name in ("e0", "e7"):
            rig.lane.handle(Report(name, 1, Load(num_running=3), served_token=True))
            rig.lane.handle(CacheChanges(name, 1, 0, is_whole=True, added=(CachedBlock(b"n", b"", "", b""),)))
        heard = [one.engine_id for one in rig.ring.emitted if isinstance(one, Report | CacheChanges)]
        assert heard == ["e0", "e0"]
        assert [one.engine_id for one in rig.lane.loads.now().engines] == ["e0"]
        change(rig, "e1")
        assert not rig.lane.loads.now().engines


async def test_late_probes_of_an_engine_that_left_tell_nothing() -> None:
    async with running(TWO) as rig:
        await whole(rig)
        (late,) = [one for one in rig.ring.emitted if isinstance(one, Probe) and "e1" in one.route][-1:]
        change(rig, "e0")
        rig.lane.handle(late)
        assert rig.lane.watch._liveness.complete == {"e0"}
        assert Role.ENGINE in {one.role for one in rig.lane.watch._liveness._known.values()}
