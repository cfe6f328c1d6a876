"""Several models behind one gateway, in real processes: routing, loading, swapping under streams, breaking, leaving."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx2
import pytest
from sluice.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

import sluice_server.demo
from tests.system.service import Service, generate, serve, spec, wait_until

TARGET = Path(sluice_server.demo.__file__).parent / "target"
CACHE = ("--kv-cache-tokens", "2048")


def checkpoints(folder: Path, *names: str) -> None:
    """Copies of the demo model, of which each has another revision."""
    for name in names:
        shutil.copytree(TARGET, folder / name, dirs_exist_ok=True)
        with (folder / name / "generation_config.json").open("a") as file:
            file.write(" " * (1 + len(name) + ord(name[-1])))


@contextlib.contextmanager
def two(folder: Path, *options: str) -> Iterator[Service]:
    """A service of the models `v1`, whose alias is `chat`, and `other`."""
    checkpoints(folder, "v1", "other")
    file = folder / "models.toml"
    file.write_text(
        f'default = "chat"\n[models.v1]\nsource = "{folder}/v1"\nalias = "chat"\n'
        f'[models.other]\nsource = "{folder}/other"\nsettings.max-num-seqs = 4\n'
    )
    with serve("--models", str(file), "--models-dir", str(folder), *CACHE, *options) as service:
        with service.control() as control:
            wait_until(lambda: set(states(control).values()) == {"READY"}, 90, "both models serve")
        yield service


def states(control: control_pb2_grpc.ControlServiceStub) -> dict[str, str]:
    found = control.ListModels(control_pb2.ListModelsRequest()).models
    return {one.id: control_pb2.ModelState.Name(one.state).removeprefix("MODEL_STATE_") for one in found}


def answered(service: Service, model: str | None, num: int = 4) -> str:
    """The model that answers a request for this one."""
    wanted = spec("def f(", num)
    if model is not None:
        wanted.model = model
    with service.stub() as stub:
        return str(stub.Generate(inference_pb2.GenerateRequest(spec=wanted), timeout=60).model)


class Streams:
    """Clients that stream one generation after the other from an alias, until they are stopped."""

    def __init__(self, service: Service, num: int, tokens: int = 48) -> None:
        self.service, self.tokens = service, tokens
        self.models: list[str] = []  # of ended streams, in order
        self.errors: list[Exception] = []
        self.mixed = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(at,)) for at in range(num)]
        for thread in self._threads:
            thread.start()

    def _run(self, at: int) -> None:
        try:
            with self.service.stub() as stub:
                while not self._stop.is_set():
                    wanted = spec(f"def f{at}(", self.tokens)
                    wanted.model = "chat"
                    self._stream(stub, wanted)
        except Exception as error:  # told by `end`
            self.errors.append(error)

    def _stream(self, stub: inference_pb2_grpc.InferenceServiceStub, wanted: types_pb2.GenerationSpec) -> None:
        model, revision, num = "", "", 0
        for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=120):
            kind = event.WhichOneof("event")
            if kind == "accepted":
                model, revision = event.accepted.model, event.accepted.revision
            elif kind == "delta":
                num += len(event.delta.tokens)
            elif kind == "finished":
                self.mixed += event.finished.usage.completion_tokens != self.tokens
        assert model and revision
        self.models.append(model)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert not self.errors and not self.mixed


@pytest.mark.long
def test_a_version_is_swapped_under_streams_and_none_fails(tmp_path: Path) -> None:
    checkpoints(tmp_path, "v2")
    with two(tmp_path) as service, service.control() as control:
        streams = Streams(service, 32)
        control.LoadModel(control_pb2.LoadModelRequest(model="v2"), timeout=120)
        assert set(streams.models) == {"v1"}
        target = control_pb2.AliasTarget(model="v2")
        control.SetAlias(control_pb2.SetAliasRequest(alias="chat", targets=[target]))
        assert answered(service, "chat") == "v2"
        control.UnloadModel(control_pb2.UnloadModelRequest(model="v1"), timeout=120)
        num = len(streams.models)
        wait_until(lambda: len(streams.models) > num + 32, 90, "streams go on")
        streams.end()
        assert set(streams.models[num + 32 :]) == {"v2"} and states(control) == {"other": "READY", "v2": "READY"}
        wait_until(lambda: not any(name.startswith("engine") for name in service.children()), 20, "v1 is gone")


def test_two_models_are_served_by_their_names_and_one_leaves(tmp_path: Path) -> None:
    with two(tmp_path, "--http", "127.0.0.1:0") as service, service.control() as control:
        assert [answered(service, name) for name in (None, "chat", "v1", "other")] == ["v1", "v1", "v1", "other"]
        listed = httpx2.get(f"{service.http}/v1/models").json()["data"]
        assert sorted(one["id"] for one in listed) == ["chat", "other", "v1"]
        body = {"model": "other", "prompt": "def f(", "max_tokens": 2}
        assert httpx2.post(f"{service.http}/v1/completions", json=body, timeout=60).json()["model"] == "other"
        with pytest.raises(grpc.RpcError, match="serves 'v1', 'other', 'chat'"):
            answered(service, "none")
        large = control_pb2.LoadModelRequest(model="v1-large", source="v1", settings={"kv-cache-tokens": "16000000"})
        with pytest.raises(
            grpc.RpcError, match=r"needs \d+ MiB \(.* MiB of cache.*weights-offload-bytes, or raise --memory-budget"
        ):
            control.LoadModel(large, timeout=60)
        assert states(control) == {"other": "READY", "v1": "READY"}
        control.UnloadModel(control_pb2.UnloadModelRequest(model="other"), timeout=60)
        assert states(control) == {"v1": "READY"}
        wait_until(lambda: not any(name.startswith("m1-") for name in service.children()), 20, "other is gone")


@pytest.mark.long
def test_a_broken_model_is_given_up_and_a_killed_engine_s_streams_go_on(tmp_path: Path) -> None:
    with two(tmp_path) as service, service.control() as control:
        checkpoints(tmp_path, "broken")
        weights = next((tmp_path / "broken").glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-2000])  # the header is whole
        with pytest.raises(grpc.RpcError, match="corrupt or cut short"):
            control.LoadModel(control_pb2.LoadModelRequest(model="broken"), timeout=120)
        assert states(control) == {"other": "READY", "v1": "READY"}
        # The engine of one lane ends: its generation goes on to the same text, and the other lane notices nothing.
        with service.stub() as stub:
            wanted = spec("class A:", 200)
            wanted.model = "other"
            whole = generate(stub, wanted).text
            call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=120)
            text = "".join(_killing(service, call))
            assert text == whole and answered(service, "v1") == "v1"


@pytest.mark.long
def test_a_model_whose_engine_is_killed_while_it_loads_is_given_up_and_the_others_serve(tmp_path: Path) -> None:
    with two(tmp_path) as service, service.control() as control:
        checkpoints(tmp_path, "v2")
        loading = control.LoadModel.future(control_pb2.LoadModelRequest(model="v2"), timeout=120)
        wait_until(lambda: "m2-engine-0" in service.children(), 60, "its engine starts")
        service.children()["m2-engine-0"].send_signal(signal.SIGKILL)
        with pytest.raises(grpc.RpcError, match="the model 'v2' was not loaded: m2-engine-0") as failed:
            loading.result()
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert states(control) == {"other": "READY", "v1": "READY"} and answered(service, "chat") == "v1"
        assert control.LoadModel(control_pb2.LoadModelRequest(model="v2"), timeout=120).model.id == "v2"
        targets = [control_pb2.AliasTarget(model=name, weight=weight) for name, weight in (("v1", 9), ("v2", 1))]
        control.SetAlias(control_pb2.SetAliasRequest(alias="chat", targets=targets))
        found = [answered(service, "chat", 1) for _ in range(300)]
        assert 0.02 <= found.count("v2") / 300 <= 0.2  # more than four standard deviations to both sides


@pytest.mark.long
def test_a_model_sleeps_and_a_request_wakes_it(tmp_path: Path) -> None:
    with two(tmp_path) as service, service.control() as control:
        text = generate_of(service, "other")
        control.SleepModel(control_pb2.SleepModelRequest(model="other"), timeout=60)
        assert states(control) == {"other": "SLEEPING", "v1": "READY"}
        wait_until(lambda: not any(name.startswith("m1-") for name in service.children()), 20, "it has no processes")
        assert answered(service, "v1") == "v1"
        assert generate_of(service, "other") == text  # it waits until the model is awake
        assert states(control) == {"other": "READY", "v1": "READY"}
        control.SleepModel(control_pb2.SleepModelRequest(model="other"), timeout=60)
        assert control.WakeModel(control_pb2.WakeModelRequest(model="other"), timeout=90).model.id == "other"
        assert generate_of(service, "other") == text
        for name, child in service.children().items():  # what was read at a low priority is computed at no such one
            assert {os.getpriority(os.PRIO_PROCESS, one.id) for one in child.threads()} == {os.nice(0)}, name


@pytest.mark.long
def test_a_request_that_comes_before_a_model_sleeps_keeps_it_awake(tmp_path: Path) -> None:
    with two(tmp_path) as service, service.control() as control, service.stub() as stub:
        engine = service.children()["m1-engine-0"].pid
        wanted = spec("class A:", 900)
        wanted.model = "other"
        stream = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=120)
        assert next(stream).WhichOneof("event") == "accepted"
        sleeping = control.SleepModel.future(control_pb2.SleepModelRequest(model="other"), timeout=120)
        wait_until(lambda: states(control)["other"] == "SLEEPING", 20, "it is about to sleep")
        assert answered(service, "other") == "other"
        with pytest.raises(grpc.RpcError, match="serves on") as failed:
            sleeping.result()
        assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert sum(len(event.delta.tokens) for event in stream) == 900
        assert service.children()["m1-engine-0"].pid == engine


@pytest.mark.long
def test_a_model_sleeps_with_its_weights_and_gives_the_memory_of_its_cache_back(tmp_path: Path) -> None:
    sizes = "--kv-cache-tokens", "32768", "--max-num-seqs", "8"
    with two(tmp_path, *sizes) as service, service.control() as control:
        text = generate_of(service, "other")
        engine = service.children()["m1-engine-0"]
        least = engine.memory_info().rss
        streams = [spec([3 + at] * 1900, 2) for at in range(17)]  # they fill the cache
        for wanted in streams:
            wanted.model = "other"
            with service.stub() as stub:
                generate(stub, wanted)
        filled = engine.memory_info().rss
        for wakes in (lambda: generate_of(service, "other"), lambda: control.WakeModel(_waking, timeout=60)):
            control.SleepModel(control_pb2.SleepModelRequest(model="other", level=1), timeout=60)
            found = next(one for one in control.ListModels(control_pb2.ListModelsRequest()).models if one.id == "other")
            assert found.sleep_level == 1 and "m1-engine-0" in found.processes
            assert states(control) == {"other": "SLEEPING", "v1": "READY"}
            assert filled - engine.memory_info().rss > 0.9 * (filled - least)
            assert answered(service, "v1") == "v1"
            wakes()
            assert states(control) == {"other": "READY", "v1": "READY"} and generate_of(service, "other") == text
        assert engine.is_running() and service.children()["m1-engine-0"].pid == engine.pid
        control.SleepModel(control_pb2.SleepModelRequest(model="other", level=1), timeout=60)
        control.SleepModel(control_pb2.SleepModelRequest(model="other"), timeout=60)  # deeper
        wait_until(lambda: not any(name.startswith("m1-") for name in service.children()), 20, "it has no processes")
        assert generate_of(service, "other") == text


_waking = control_pb2.WakeModelRequest(model="other")


def generate_of(service: Service, model: str) -> str:
    """The text of a greedy generation of a model."""
    wanted = spec("def f(", 12)
    wanted.model = model
    with service.stub() as stub:
        return str(generate(stub, wanted).text)


def _killing(service: Service, call: "Iterator[inference_pb2.StreamGenerateResponse]") -> Iterator[str]:
    """The texts of a stream; the engine is killed behind the first one."""
    is_killed = False
    for event in call:
        if event.WhichOneof("event") == "delta":
            yield event.delta.text
            if not is_killed:
                is_killed = True
                service.children()["m1-engine-0"].send_signal(signal.SIGKILL)
