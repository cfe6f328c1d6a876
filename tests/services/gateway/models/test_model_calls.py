"""The calls about models: what they check, what they ask of the supervisor, and what they wait for."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from sluice.v1 import control_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.executor.computing import Computing
from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.gateway.models.known import News
from sluice_server.services.messages.details import Load
from sluice_server.services.messages.processes import Report
from sluice_server.services.process.model_commands import Command, LoadLane, NameModels, SleepLane, UnloadLane
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable
from sluice_server.services.process.models_file import NamedModel
from tests.services.gateway.fake_ring import MODEL, SETTINGS, FakeRing, Rig, running

TOY = LaneEntry("toy", "/toy", state=LaneState.READY, pinned=True)
NEW = LaneEntry("new", "/new")


class Supervised:
    """A supervisor that the test plays."""

    def __init__(self, gateway: Gateway, folder: Path) -> None:
        self.news = News()
        self.table = ModelTable({"m0": TOY})
        self.models_dir = str(folder)
        self.commands: list[Command] = []
        self.on_command: Callable[[], None] = lambda: None
        self._gateway = gateway
        gateway.known = self
        self.change()

    def declared(self, model: str) -> NamedModel | None:
        known = NamedModel("known", "/known", "label", pinned=True, options={"max_num_seqs": 3, "block_size": 8})
        return known if model == "known" else None

    async def loading_of(self, named: NamedModel) -> LoadLane:
        return LoadLane(LaneEntry(named.id, named.source, named.revision, named.options, pinned=named.pinned))

    async def ask(self, command: Command) -> str:
        self.commands.append(command)
        asyncio.get_running_loop().call_soon(self.on_command)
        return "m1"

    def change(self, **fields: Any) -> None:  # noqa: ANN401 # of the table
        self.table = msgspec.structs.replace(self.table, **fields)
        self._gateway.models.facts = {entry.model: entry for entry in self.table.lanes.values()}
        self._gateway.models.aliases = self.table.aliases
        self.news.tell()

    def state(self, state: LaneState) -> None:
        """Gives the new lane a state."""
        self.change(lanes={"m0": TOY, "m1": msgspec.structs.replace(NEW, state=state)})


@contextlib.asynccontextmanager
async def supervised(folder: Path) -> AsyncIterator[tuple[Rig, Supervised]]:
    made: list[Supervised] = []
    async with running(prepare=lambda gateway: made.append(Supervised(gateway, folder))) as rig:
        (folder / "new").mkdir(exist_ok=True)
        yield rig, made[0]


async def opened(rig: Rig) -> None:
    ring = FakeRing()
    model = dataclasses.replace(MODEL, id="new", revision="r1")
    lane = ring.opened(rig.gateway, dataclasses.replace(SETTINGS, model=model), "m1")
    await ring.until(lambda: lane.is_serving)


def load(rig: Rig, **fields: Any) -> "grpc.aio.UnaryUnaryCall[Any, control_pb2.LoadModelResponse]":  # noqa: ANN401 # of the request
    return rig.control.LoadModel(control_pb2.LoadModelRequest(**{"model": "new", **fields}))


async def test_a_load_answers_when_the_model_serves(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        watch = aiter(rig.control.WatchModels(control_pb2.WatchModelsRequest()))
        assert [one.id for one in (await anext(watch)).models] == ["toy"]
        known.on_command = lambda: known.state(LaneState.LOADING)
        call = load(rig, settings={"max-num-seqs": "4"}, pinned=True)
        assert [(one.id, one.state) for one in (await anext(watch)).models] == [
            ("new", control_pb2.MODEL_STATE_LOADING),
            ("toy", control_pb2.MODEL_STATE_READY),
        ]
        path = str((tmp_path / "new").resolve())
        assert known.commands == [LoadLane(LaneEntry("new", path, options={"max_num_seqs": 4}, pinned=True))]
        await opened(rig)
        known.state(LaneState.READY)
        answer = (await call).model
        assert (answer.id, answer.state, list(answer.processes)) == (
            *("new", control_pb2.MODEL_STATE_READY),
            ["d0", "e0", "t0"],
        )


async def test_a_load_that_is_given_up_or_unloaded_fails_with_the_reason(tmp_path: Path) -> None:
    for ends, why in (
        (lambda known: known.change(given_up={"m1": "engine-0 ended"}), "engine-0 ended"),
        (lambda known: (known.state(LaneState.LOADING), known.state(LaneState.DRAINING)), "unloaded meanwhile"),
    ):
        async with supervised(tmp_path) as (rig, known):
            known.on_command = lambda known=known, ends=ends: ends(known)  # type: ignore[misc] # bound now
            with pytest.raises(grpc.aio.AioRpcError, match=why) as failed:
                await load(rig)
            assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_model_of_another_revision_than_expected_is_unloaded_again(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        await opened(rig)
        known.state(LaneState.READY)
        assert (await load(rig, expected_revision="r1")).model.id == "new"
        with pytest.raises(grpc.aio.AioRpcError, match="is 'r2', and the files have 'r1'"):
            await load(rig, expected_revision="r2")
        assert known.commands[-1] == UnloadLane("new", 0.0)


async def test_a_declared_model_has_its_settings_from_the_file(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        known.on_command = lambda: known.change(given_up={"m1": "enough"})
        with pytest.raises(grpc.aio.AioRpcError, match="enough"):
            await load(rig, model="known", settings={"max-num-seqs": "4"})
        entry = LaneEntry("known", "/known", "label", {"max_num_seqs": 4, "block_size": 8}, pinned=True)
        assert known.commands == [LoadLane(entry)]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": ""}, "model"),
        ({"model": "a:b"}, "has a colon"),
        ({"model": "x" * 257}, "has 257 bytes"),
        ({"model": "none"}, "there is no 'none' below"),
        ({"source": "../new"}, "there is no '../new' below"),
        ({"source": "/etc"}, "there is no '/etc' below"),
        ({"source": "link"}, "there is no 'link' below"),
        ({"source": "."}, "there is no '.' below"),
        ({"source": "x" * 1025}, "has 1025 bytes"),
        ({"settings": {"listen": "x"}}, "no setting that a model has of its own"),
        ({"settings": {"max-num-seqs": "x"}}, "'x' is not a whole number"),
        ({"settings": {"x" * 1025: ""}}, "has 1025 bytes"),
        ({"settings": {f"x{at}": "" for at in range(65)}}, "has 65 entries"),
        ({"revision": "x" * 129}, "has 129 bytes"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_before_anything_starts(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    async with supervised(tmp_path) as (rig, known):
        (tmp_path / "link").symlink_to("/usr")
        with pytest.raises(grpc.aio.AioRpcError, match=why):
            await load(rig, **fields)
        assert not known.commands


async def test_an_unload_answers_when_the_model_is_gone(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        known.state(LaneState.DRAINING)
        asked = control_pb2.UnloadModelRequest(model="new")
        asked.grace.seconds = 3
        call = rig.control.UnloadModel(asked)
        while not known.commands:
            await asyncio.sleep(0)
        states = {one.id: one.state for one in (await rig.control.ListModels(control_pb2.ListModelsRequest())).models}
        assert states == {"new": control_pb2.MODEL_STATE_UNLOADING, "toy": control_pb2.MODEL_STATE_READY}
        assert known.commands == [UnloadLane("new", 3.0)] and not call.done()
        known.change(lanes={"m0": TOY})
        await call


async def test_an_alias_is_followed_before_the_answer(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        known.on_command = lambda: known.change(aliases={"chat": {"toy": 3}})
        targets = [control_pb2.AliasTarget(model="toy", weight=3), control_pb2.AliasTarget(model="new", weight=0)]
        await rig.control.SetAlias(control_pb2.SetAliasRequest(alias="chat", targets=targets))
        assert known.commands == [NameModels("chat", {"toy": 3})]
        found = (await rig.control.GetModel(control_pb2.GetModelRequest(model="chat"))).model
        assert (found.id, [(one.alias, one.weight) for one in found.aliases]) == ("toy", [("chat", 3)])
        assert found.pinned


@pytest.mark.parametrize(
    ("alias", "targets", "why"),
    [
        ("", {"toy": 1}, "alias"),
        ("a:b", {"toy": 1}, "has a colon"),
        ("chat", {"toy": 0, "new": 0}, "the weights are all 0"),
        ("chat", {"toy": 10_001}, "10001 is above 10000"),
        ("chat", {"": 1}, r"targets\[0\].model"),
        ("chat", {f"x{at}": 1 for at in range(17)}, "has 17 models; 16 are allowed"),
    ],
)
async def test_an_alias_that_cannot_be_is_refused(
    tmp_path: Path, alias: str, targets: dict[str, int], why: str
) -> None:
    async with supervised(tmp_path) as (rig, known):
        wanted = [control_pb2.AliasTarget(model=model, weight=weight) for model, weight in targets.items()]
        with pytest.raises(grpc.aio.AioRpcError, match=why):
            await rig.control.SetAlias(control_pb2.SetAliasRequest(alias=alias, targets=wanted))
        assert not known.commands


async def test_a_model_that_failed_is_listed_with_the_reason(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        broken = msgspec.structs.replace(NEW, state=LaneState.FAILED, why="é" * 600)
        known.change(lanes={"m0": TOY, "m1": broken})
        found = (await rig.control.GetModel(control_pb2.GetModelRequest(model="new"))).model
        assert found.state == control_pb2.MODEL_STATE_FAILED and found.failure == "é" * 512


async def test_the_supervisor_s_refusal_is_that_of_the_call(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):

        async def refuse(command: Command) -> str:
            raise ServiceError(Code.FAILED_PRECONDITION, "MODEL_IN_USE", "it stays", field="model")

        known.ask = refuse  # type: ignore[method-assign] # the refusal itself
        with pytest.raises(grpc.aio.AioRpcError, match="it stays"):
            await rig.control.UnloadModel(control_pb2.UnloadModelRequest(model="toy"))


async def test_a_sleep_answers_when_memory_is_given_back_and_says_how_deep_it_is(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        await opened(rig)
        known.state(LaneState.DOZING)
        call = rig.control.SleepModel(control_pb2.SleepModelRequest(model="new", level=1))
        watch = aiter(rig.control.WatchModels(control_pb2.WatchModelsRequest()))
        while (await anext(watch)).models[0].state != control_pb2.MODEL_STATE_SLEEPING:
            pass
        known.state(LaneState.NAPPING)
        seen = (await anext(watch)).models[0]
        assert (seen.sleep_level, list(seen.processes)) == (1, ["d0", "e0", "t0"]) and not call.done()
        known.change(lanes={"m0": TOY, "m1": msgspec.structs.replace(NEW, state=LaneState.NAPPING, is_empty=True)})
        await call
        assert known.commands == [SleepLane("new", 1e9, 1)]
        known.state(LaneState.SLEEPING)
        await rig.control.SleepModel(control_pb2.SleepModelRequest(model="new"))
        assert known.commands[-1] == SleepLane("new", 1e9, 2)
        listed = (await rig.control.ListModels(control_pb2.ListModelsRequest())).models[0]
        assert (listed.sleep_level, list(listed.processes)) == (2, [])


async def test_a_sleep_that_a_request_ends_says_so(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        known.state(LaneState.DOZING)
        known.on_command = lambda: known.state(LaneState.LOADING)
        with pytest.raises(grpc.aio.AioRpcError, match="'new' serves on: it was asked for") as failed:
            await rig.control.SleepModel(control_pb2.SleepModelRequest(model="new"))
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("level", [0, 3])
async def test_a_level_of_sleep_that_there_is_not_is_refused(tmp_path: Path, level: int) -> None:
    async with supervised(tmp_path) as (rig, known):
        with pytest.raises(grpc.aio.AioRpcError, match=rf"level: {level} is not in \[1, 2\]"):
            await rig.control.SleepModel(control_pb2.SleepModelRequest(model="new", level=level))
        assert not known.commands


async def test_a_cache_of_fixed_size_sleeps_at_level_2_only(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        await opened(rig)
        lane = rig.gateway.lanes["m1"]
        fixed = Computing(has_fixed_cache=True)
        lane.handle(Report("e0", 1, Load(), served_token=True, computing=fixed))
        with pytest.raises(grpc.aio.AioRpcError, match="its cache has a fixed size: use level 2"):
            await rig.control.SleepModel(control_pb2.SleepModelRequest(model="new", level=1))
        assert not known.commands


async def test_a_gateway_that_drains_loads_and_wakes_nothing(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, known):
        known.on_command = lambda: known.state(LaneState.LOADING)
        call = load(rig)
        watch = aiter(rig.control.WatchModels(control_pb2.WatchModelsRequest()))
        while len((await anext(watch)).models) < 2:
            pass
        rig.gateway.leave()
        known.news.tell()
        waking = rig.control.WakeModel(control_pb2.WakeModelRequest(model="new"))
        for one in (call, load(rig), waking):
            with pytest.raises(grpc.aio.AioRpcError, match="is shutting down") as failed:
                await one
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert len(known.commands) == 1


async def test_a_model_is_up_at_a_gateway_that_drains(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (rig, _):
        rig.gateway.leave()
        ring = FakeRing()
        lane = ring.opened(rig.gateway, dataclasses.replace(SETTINGS, model=dataclasses.replace(MODEL, id="new")), "m1")
        assert not lane.is_up
        await ring.until(lambda: lane.is_up)
        assert not lane.is_serving
