"""Pictures and adapters over ranks that are processes of their own: tokens of `transformers`, also when ranks end."""

from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from tests.oracle.vision_checkpoints import make_served_llava
from tests.system.service import Service, serve, wait_until
from tests.system.test_system_adapters import NAMES, Rig, wanted_of, write
from tests.system.test_system_checkpoints import copied, spoil, start
from tests.system.test_system_images import TEXT, answered, asked, ids_of, once_serving, oracle, picture

RANKS = ("worker-0-1", "engine-0")
# Ranks of a test take turns on the cores that there are.
COMMON = ("--dtype", "float32", "--max-num-batched-tokens", "64", "--allow-shared-cores", "--max-restarts", "100")
NUM = 200  # tokens of a stream
KINDS = ["--tensor-parallel-size", "--pipeline-parallel-size"]


def text_of(
    stub: inference_pb2_grpc.InferenceServiceStub, wanted: types_pb2.GenerationSpec, then: Callable[[], None]
) -> str:
    """The text of a stream, with something done behind its first piece."""
    text = ""
    for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=120):
        if event.HasField("delta"):
            if not text:
                then()
            text += event.delta.text
    return text


def ranks_of(service: Service) -> dict[str, psutil.Process]:
    """The processes of all ranks, once they have titles."""
    wait_until(lambda: service.children().keys() >= set(RANKS), 60.0, "not all ranks run")
    return service.children()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_pictures_outlive_each_rank(kind: str, tmp_path: Path) -> None:
    made = tmp_path, make_served_llava(tmp_path)
    with serve("--model", str(tmp_path), *COMMON, kind, "2") as service, service.stub() as stub:
        assert ids_of(answered(stub, asked(picture(1), TEXT))) == oracle(made, TEXT, picture(1))
        for name in RANKS:
            wanted = asked(picture(7), TEXT, picture(8), num=200, temperature=1.0, seed=5)
            whole = answered(stub, wanted).outputs[0].text
            assert text_of(stub, wanted, ranks_of(service)[name].kill) == whole
            assert ids_of(once_serving(stub, asked(picture(9), TEXT))) == oracle(made, TEXT, picture(9))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RANKS)
def test_adapters_outlive_each_rank(kind: str, name: str, tmp_path: Path) -> None:
    """Those in flight, and the names of those that were loaded, replaced and unloaded."""
    for seed, adapter in enumerate(NAMES):
        write(tmp_path, adapter, seed, rank=2 + seed)
    with serve("--adapter-dir", str(tmp_path), "--max-adapters", "4", *COMMON, kind, "2") as service:
        rig = Rig(service, tmp_path)
        rig.load("renamed", path="d")
        rig.load("dropped", path="a")
        rig.unload("dropped")
        old, former = rig.stream("a", NUM), rig.tokens("a", NUM)
        write(tmp_path, "a", 10)
        assert rig.load("a").digest != old.accepted.adapter_digest
        assert old.rest() == former != rig.tokens("a", NUM)
        expected, doomed = {one: rig.tokens(one, NUM) for one in (*NAMES, "")}, ranks_of(service)[name]
        for one, tokens in expected.items():
            assert tokens[:12] == wanted_of(tmp_path, one), one
        streams = {one: rig.stream(one, NUM) for one in expected}
        doomed.kill()
        assert {one: stream.rest() for one, stream in streams.items()} == expected

        def is_served() -> bool:
            try:
                return rig.tokens("renamed") == expected["d"][:12]
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                return False

        wait_until(is_served, 60.0, "the group does not serve again")
        assert set(rig.listed()) == {*NAMES, "renamed"}
        assert rig.tokens("a", NUM) == expected["a"]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_lacks_a_tensor_ends_the_service(kind: str, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    directory = spoil(copied(tmp_path), lambda weights: weights.pop(name))
    ended = start("--model", str(directory), *COMMON, kind, "2", "--listen", f"unix:{tmp_path}/s")
    assert ended.returncode and f"no safetensors file holds the tensor {name}" in ended.stderr
