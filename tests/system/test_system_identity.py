"""Revisions are named by content: no cached block and no stream mixes two checkpoints."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from sluice_server.services.gateway.contract.status import DETAILS_KEY
from sluice_server.services.process.joining import EXIT_OUTDATED
from tests.faults.faulty import faults
from tests.system.roles import four_roles
from tests.system.service import Service, serve, spec, wait_until
from tests.system.weights import WEIGHTS, copied, fine_tuned, replace

PROMPT = [(7 * i) % 4000 + 3 for i in range(230)]  # more than seven blocks
OPTIONS = ("--dtype", "float32", "--kv-cache-tokens", "2048", "--max-restarts", "20")
BLOCK_BYTES = 32 * 4 * 2 * 2 * 64 * 4
BACK_WITHIN_S = 60.0
SLOW = faults(slow="sluice_server.engine.models.model:Model.forward")  # a long stream takes over a minute


class Stream(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, service: Service, asked: types_pb2.GenerationSpec) -> None:
        super().__init__()
        self.first = threading.Event()
        self.revision = self.generation_id = self.end = ""
        self._service, self._asked = service, asked

    def run(self) -> None:
        with self._service.stub() as stub:
            try:
                for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=self._asked), timeout=120):
                    if event.HasField("accepted"):
                        self.revision = event.accepted.revision
                        self.generation_id = event.accepted.generation_id
                    if event.delta.tokens:
                        self.first.set()
                self.end = "Finished"
            except grpc.RpcError as error:
                self.end = end_of(error)

    def begun(self) -> "Stream":
        """The stream, started and with its first token."""
        self.start()
        assert self.first.wait(60)
        return self


def end_of(error: grpc.RpcError) -> str:
    """A failed call's status and reason."""
    assert isinstance(error, grpc.Call)
    details = dict(error.trailing_metadata() or ()).get(DETAILS_KEY, b"")
    return f"{error.code().name} {'REVISION_CHANGED' if b'REVISION_CHANGED' in details else error.details()}"


def whole(service: Service, *, bypass: bool = False) -> inference_pb2.GenerateResponse:
    """An answer, as soon as requests are admitted."""
    asked = spec(PROMPT, 12)
    asked.cache.bypass = bypass
    found: list[inference_pb2.GenerateResponse] = []

    def is_answered() -> bool:
        with service.stub() as stub:
            try:
                found.append(stub.Generate(inference_pb2.GenerateRequest(spec=asked), timeout=60))
            except grpc.RpcError as error:
                assert end_of(error).startswith("UNAVAILABLE"), end_of(error)
        return bool(found)

    wait_until(is_answered, BACK_WITHIN_S, "requests are not let in")
    return found[0]


def ids_of(answer: inference_pb2.GenerateResponse) -> list[int]:
    return [token.id for token in answer.outputs[0].tokens]


def served(service: Service) -> str:
    with service.control() as control:
        listed = control.ListModels(control_pb2.ListModelsRequest(), timeout=10).models[0]
        got = control.GetModel(control_pb2.GetModelRequest(model=listed.id), timeout=10).model
        assert got.revision == listed.revision
        return listed.revision


def reload(service: Service) -> None:
    service.process.send_signal(signal.SIGHUP)


def kill_engine(service: Service) -> None:
    service.children()["engine-0"].kill()


def long_stream(action: types_pb2.DisconnectAction.ValueType) -> types_pb2.GenerationSpec:
    asked = spec([5, 6, 7], 1500)
    asked.scheduling.on_disconnect = action
    return asked


@pytest.mark.parametrize(
    ("lose", "names"),
    [
        (reload, (WEIGHTS,)),
        pytest.param(kill_engine, (WEIGHTS, "tokenizer.json", "generation_config.json"), marks=pytest.mark.long),
    ],
)
def test_streams_of_replaced_files_end_and_new_ones_name_the_new_revision(
    tmp_path: Path, lose: Callable[[Service], None], names: tuple[str, ...]
) -> None:
    """Also if tokenizer and detokenizer, which keep running, read other files than the engine: they are restarted."""
    model, other = copied(tmp_path / "model"), fine_tuned(tmp_path / "other")
    with (other / "tokenizer.json").open("a") as tokenizer:
        tokenizer.write("\n")
    defaults = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps({**defaults, "do_sample": True, "temperature": 0.625}))
    with serve("--model", str(model), *OPTIONS, environment=SLOW) as service:
        before, revision = whole(service), served(service)
        keyed = long_stream(types_pb2.DISCONNECT_ACTION_CANCEL)
        keyed.idempotency_key = "once"
        keeping = long_stream(types_pb2.DISCONNECT_ACTION_DETACH)
        read, detached = Stream(service, keyed).begun(), Stream(service, keeping).begun()
        replace(model, other, names)
        lose(service)
        read.join(60)
        detached.join(60)
        gone = "FAILED_PRECONDITION REVISION_CHANGED"
        assert (read.end, detached.end) == (gone, gone)
        after = whole(service)
        assert after.revision == served(service) != before.revision == revision == read.revision
        assert ids_of(after) != ids_of(before)
        with service.stub() as stub:
            keeping.resume.generation_id = detached.generation_id
            with pytest.raises(grpc.RpcError) as error:
                list(stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(spec=keeping), timeout=30))
        assert end_of(error.value) == gone
        before_part, after_part = before.revision.split("-"), after.revision.split("-")
        assert [one == two for one, two in zip(before_part, after_part, strict=True)] == [len(names) == 1, False]
        with service.control() as control:
            told = control.ListModels(control_pb2.ListModelsRequest(), timeout=10).models[0].defaults
        assert (told.temperature == 0.625) == ("generation_config.json" in names)


@pytest.mark.long
def test_a_cache_on_disk_is_of_one_content(tmp_path: Path) -> None:
    model, other = copied(tmp_path / "model"), fine_tuned(tmp_path / "other")
    tiers = ("--host-cache-bytes", str(8 * BLOCK_BYTES), "--disk-cache-bytes", str(400 * BLOCK_BYTES))
    disk = tmp_path / "disk"
    with serve("--model", str(model), *OPTIONS, *tiers, "--disk-cache-dir", str(disk)) as service:
        first = whole(service)
        with service.stub() as stub:
            for i in range(18):  # what pushes it out of the device and of the host
                evicting = spec([3000 + i, *PROMPT[1:]], 1)
                stub.Generate(inference_pb2.GenerateRequest(spec=evicting), timeout=60)
        wait_until(lambda: len(list(disk.glob("*.kv"))) > 8, 60, "nothing is written to the disk")
    assert len(list(disk.glob("*.kv"))) >= 19 * 7, "what the device held is saved at the end"
    with serve("--model", str(other), *OPTIONS, *tiers, "--disk-cache-dir", str(disk)) as service:
        on_cache = whole(service)
        assert (on_cache.usage.cached_tokens, on_cache.model) == (0, "other")
        assert ids_of(whole(service, bypass=True)) == ids_of(on_cache) != ids_of(first)
    renamed = copied(tmp_path / "renamed", model)
    with serve("--model", str(renamed), *OPTIONS, *tiers, "--disk-cache-dir", str(disk)) as service:
        again = whole(service)
        assert again.usage.cached_tokens == 224 and again.revision == first.revision
        assert ids_of(again) == ids_of(first)


@pytest.mark.long
def test_roles_that_run_alone_end_when_they_are_outdated(tmp_path: Path) -> None:
    """A role that has read other files than the engine exits with a status of its own, to be started again."""
    model, other = copied(tmp_path / "model"), fine_tuned(tmp_path / "other")
    with (other / "tokenizer.json").open("a") as tokenizer:
        tokenizer.write("\n")
    with four_roles(tmp_path / "keys", str(model), SLOW) as roles:
        wait_until(roles.is_serving, BACK_WITHIN_S, "the roles do not serve")
        before = whole(roles.service)
        read = Stream(roles.service, long_stream(types_pb2.DISCONNECT_ACTION_CANCEL)).begun()
        replace(model, other, (WEIGHTS, "tokenizer.json"))
        roles.replace("engine")
        for role in ("tokenizer", "detokenizer"):
            assert roles.processes[role].wait(BACK_WITHIN_S) == EXIT_OUTDATED
            roles.start(role)
        read.join(60)
        assert read.end == "FAILED_PRECONDITION REVISION_CHANGED"
        after = whole(roles.service)
        assert after.revision == served(roles.service) != before.revision
