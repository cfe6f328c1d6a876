"""Adapters through real processes: loaded on demand and by name, replaced, dropped, and after the loss of an engine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from sluice_server.engine.adapters.files import read_adapter
from sluice_server.engine.models.config import read_config
from tests.oracle.adapters import merged, modules, write_adapter
from tests.oracle.checkpoints import greedy, reference
from tests.system.service import Service, serve, spec, wait_until

DEMO = Path(__file__).parents[2] / "demo" / "target"
CONFIG = read_config(DEMO)
IDS = [*range(200, 240)]
NAMES = "abcd"


class Rig:
    """A service with four adapters in its folder."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service, self.folder = service, folder

    def tokens(self, adapter: str = "", num: int = 12, **fields: str) -> list[int]:
        """Tokens of a greedy generation."""
        wanted = named(adapter, num, **fields)
        with self.service.stub() as stub:
            answer = stub.Generate(inference_pb2.GenerateRequest(spec=wanted), timeout=60)
        assert answer.adapter == (adapter or fields.get("model", "").removeprefix("demo:"))
        return [one.id for one in answer.outputs[0].tokens]

    def stream(self, adapter: str, num: int) -> "Stream":
        """Begins a stream."""
        return Stream(self.service, named(adapter, num))

    def error(self, adapter: str) -> tuple[grpc.StatusCode, str]:
        """How a request that names this adapter is refused."""
        with pytest.raises(grpc.RpcError) as caught:
            self.tokens(adapter)
        return caught.value.code(), caught.value.details() or ""

    def listed(self) -> dict[str, control_pb2.Adapter]:
        """The adapters that have names."""
        with self.service.control() as control:
            return {one.name: one for one in control.ListAdapters(control_pb2.ListAdaptersRequest()).adapters}

    def reported(self) -> list[str]:
        """The adapters of the engine's last report, which it sends by the clock."""
        with self.service.control() as control:
            one, *_ = control.GetLoad(control_pb2.GetLoadRequest()).load.engines
        return [found.name for found in one.adapters]

    def load(self, name: str, **fields: str) -> control_pb2.Adapter:
        """Loads an adapter."""
        with self.service.control() as control:
            wanted = control_pb2.LoadAdapterRequest(adapter=name, **fields)  # type: ignore[arg-type] # mixed
            return control.LoadAdapter(wanted, timeout=60).adapter

    def unload(self, name: str) -> None:
        """Unloads an adapter."""
        with self.service.control() as control:
            control.UnloadAdapter(control_pb2.UnloadAdapterRequest(adapter=name), timeout=60)


class Stream:
    """A stream, of which the first tokens have come."""

    def __init__(self, service: Service, wanted: types_pb2.GenerationSpec) -> None:
        self._channel = grpc.insecure_channel(service.address)
        call = self._channel.unary_stream(
            "/sluice.v1.InferenceService/StreamGenerate",
            request_serializer=inference_pb2.StreamGenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.StreamGenerateResponse.FromString,
        )
        self._events = call(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=120)
        self.accepted = next(self._events).accepted
        self._first = self._ids(next(self._events))

    @staticmethod
    def _ids(event: inference_pb2.StreamGenerateResponse) -> list[int]:
        return [one.id for one in event.delta.tokens]

    def rest(self) -> list[int]:
        """All tokens, after the last has come."""
        try:
            return sum(map(self._ids, self._events), self._first)
        finally:
            self._channel.close()


def named(adapter: str, num: int, **fields: str) -> types_pb2.GenerationSpec:
    """A request with an adapter."""
    wanted = spec(IDS, num)
    if adapter:
        wanted.adapter = adapter
    for name, value in fields.items():
        setattr(wanted, name, value)
    return wanted


def write(folder: Path, name: str, seed: int, rank: int = 2) -> None:
    write_adapter(folder / name, CONFIG, rank=rank, seed=seed, lora_alpha=0.4)


def wanted_of(folder: Path, name: str, num: int = 12) -> list[int]:
    """The oracle's tokens."""
    oracle = merged(DEMO, read_adapter(folder, name, modules(CONFIG))) if name else reference(DEMO)
    return greedy(oracle, IDS, num)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write(folder, name, seed, rank=2 + seed)
    with serve("--adapter-dir", str(folder), "--max-adapters", "3", "--dtype", "float32") as service:
        yield Rig(service, folder)


def test_requests_name_adapters_in_each_way(rig: Rig) -> None:
    for name in ("", *NAMES):
        assert rig.tokens(name) == wanted_of(rig.folder, name)
    assert set(rig.listed()) == set(NAMES)
    assert rig.tokens(model="b") == rig.tokens(model="demo:b") == rig.tokens("b") != rig.tokens()
    with rig.service.control() as control:
        info = control.GetServerInfo(control_pb2.GetServerInfoRequest())
        model = control.ListModels(control_pb2.ListModelsRequest()).models[0]
    assert control_pb2.FEATURE_ADAPTERS in info.features and info.limits.max_adapters == 3
    assert list(model.adapters) == sorted(NAMES)
    wait_until(lambda: rig.reported() == sorted(NAMES), 10, "the engine's report lacks an adapter")


@pytest.mark.parametrize("name", ["nothing", "..", "a/../b", "/etc", "x" * 257])
def test_names_that_are_no_adapters_are_not_found(rig: Rig, name: str) -> None:
    code, text = rig.error(name)
    assert code is grpc.StatusCode.NOT_FOUND and "see ListAdapters" in text


def test_a_folder_that_is_no_adapter_is_refused_whole(rig: Rig) -> None:
    write(rig.folder, "broken", 9)
    config = rig.folder / "broken" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    assert rig.error("broken")[0] is grpc.StatusCode.UNIMPLEMENTED
    assert "use_dora" in rig.error("broken")[1]
    (rig.folder / "empty").mkdir(exist_ok=True)
    code, text = rig.error("empty")
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "adapter 'empty': the folder has no adapter_config" in text
    assert not {"broken", "empty"} & set(rig.listed())
    with pytest.raises(grpc.RpcError, match="expected_digest"):
        rig.load("alias", path="a", expected_digest="0" * 64)
    with pytest.raises(grpc.RpcError, match="base_model"):
        rig.load("alias", path="a", base_model="another")
    with pytest.raises(grpc.RpcError, match="colon"):
        rig.load("demo:alias", path="a")
    assert "alias" not in rig.listed()


def test_streams_end_with_the_adapter_that_they_began_with(rig: Rig) -> None:
    write(rig.folder, "moving", 20)
    digest, before = rig.load("moving").digest, rig.tokens("moving", 200)
    assert before[:12] == wanted_of(rig.folder, "moving")
    old = rig.stream("moving", 200)
    assert old.accepted.adapter_digest == digest
    write(rig.folder, "moving", 21)
    assert rig.load("moving").digest != digest
    new = rig.stream("moving", 200)
    assert new.accepted.adapter_digest != digest
    after = new.rest()
    assert old.rest() == before != after == rig.tokens("moving", 200)
    assert after[:12] == wanted_of(rig.folder, "moving")


def test_a_name_that_was_unloaded_is_unknown(rig: Rig) -> None:
    rig.load("alias", path="a")
    assert rig.tokens("alias") == rig.tokens("a")
    stream = rig.stream("alias", 100)
    rig.unload("alias")
    assert "alias" not in rig.listed()
    assert rig.error("alias")[0] is grpc.StatusCode.NOT_FOUND
    assert stream.rest() == rig.tokens("a", 100)
    with pytest.raises(grpc.RpcError) as caught:
        rig.unload("alias")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_streams_go_on_after_the_loss_of_the_engine(rig: Rig) -> None:
    rig.load("renamed", path="d")
    num, names = 300, ("a", "b", "c", "d", "")
    expected = {name: rig.tokens(name, num) for name in names}
    streams = {name: rig.stream(name, num) for name in names}
    rig.service.children()["engine-0"].kill()
    assert {name: one.rest() for name, one in streams.items()} == {name: expected[name] for name in streams}
    assert "renamed" in rig.listed()
    assert rig.tokens("renamed") == wanted_of(rig.folder, "d")


def test_without_its_files_an_adapter_is_lost_and_never_the_base(rig: Rig) -> None:
    write(rig.folder, "gone", 30)
    assert rig.tokens("gone") == wanted_of(rig.folder, "gone")
    shutil.rmtree(rig.folder / "gone")
    assert rig.tokens("gone") != rig.tokens("")  # it is in memory
    rig.service.children()["engine-0"].kill()

    # What the lost engine had not read yet, the next one answers before others are admitted: each has to be waited for.
    def is_answered() -> bool:
        code, message = rig.error("gone")
        assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)
        return code is grpc.StatusCode.FAILED_PRECONDITION and "no longer in --adapter-dir" in message

    def is_served() -> bool:
        try:
            assert rig.tokens("a") == wanted
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        return True

    wanted = wanted_of(rig.folder, "a")
    wait_until(is_answered, 60, "the engine does not come back")
    wait_until(is_served, 60, "the engine does not serve")
