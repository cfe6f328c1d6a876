"""Whole services whose engine processes have pretended GPUs: the tokens of transformers, also when one is killed."""

import dataclasses
from pathlib import Path

import pytest
from sluice.v1 import inference_pb2

from tests.faults.faulty import faults
from tests.oracle.checkpoints import greedy, make_checkpoint, reference
from tests.oracle.tokenizers import byte_level_bpe
from tests.pretended_gpu.test_pretended_engines import LLAMA
from tests.system.service import Service, serve, spec, wait_until
from tests.system.test_system_checkpoints import start

SHAPE = dataclasses.replace(LLAMA, vocab=512, kv_heads=2)
PROMPT = [*range(3, 15)]  # longer than a step
NUM = 6
PATIENT_S = 300.0
OPTIONS = (
    *("--device", "cuda", "--dtype", "float32", "--block-size", "8", "--kv-cache-tokens", "192"),
    *("--max-num-seqs", "1", "--max-num-batched-tokens", "8", "--max-model-len", "64"),
    # A step of interpreted kernels takes seconds, and a start of two GPUs a minute beside other work.
    *("--probe-timeout-s", "60", "--recovery-timeout-s", "300", "--max-restarts", "9"),
)
TWO = ("--tensor-parallel-size", "2", "--allow-shared-cores")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    byte_level_bpe(directory)
    return make_checkpoint(directory, SHAPE)


def killed_while_it_answers(service: Service, name: str) -> list[int]:
    """The tokens of a stream, behind the first of which that process is killed."""
    wait_until(lambda: name in service.children(), 60.0, f"{name} does not run")
    doomed, found = service.children()[name], list[int]()
    with service.stub() as stub:
        for event in stub.StreamGenerate(
            inference_pb2.StreamGenerateRequest(spec=spec(PROMPT, NUM)), timeout=PATIENT_S
        ):
            if event.HasField("delta"):
                if not found:
                    doomed.kill()
                found += [one.id for one in event.delta.tokens]
    assert not doomed.is_running()
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("options", "names"), [((), ("engine-0",)), (TWO, ("worker-0-1", "engine-0"))], ids=["one GPU", "two GPUs"]
)
def test_the_tokens_of_transformers(model: Path, options: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Of graphs that are recorded before it serves; over two, with collectives in them."""
    wanted = greedy(reference(model), PROMPT, NUM)
    with serve("--model", str(model), *OPTIONS, *options, environment=faults(pretended_gpus=2)) as service:
        with service.stub() as stub:
            answer = stub.Generate(inference_pb2.GenerateRequest(spec=spec(PROMPT, NUM)), timeout=PATIENT_S)
            assert [one.id for one in answer.outputs[0].tokens] == wanted
        for name in names:
            assert killed_while_it_answers(service, name) == wanted


def test_more_ranks_than_gpus_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in faults(pretended_gpus=1).items():
        monkeypatch.setenv(name, value)
    ended = start("--model", str(model), *OPTIONS, *TWO, "--listen", f"unix:{model}/s")
    assert ended.returncode != 0
    assert "--tensor-parallel-size: 2 ranks need a GPU each, and 1 can be used here" in ended.stderr
