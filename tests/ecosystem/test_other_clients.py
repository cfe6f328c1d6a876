"""Clients of other projects against a real service: each does what docs/other-clients.md says. `make test-ecosystem`.

Installs the packages from their registries, each in an environment of its own, and a published model.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks import real_model
from tests.ecosystem.clients_of_others import Client, clients, smg_program
from tests.oracle.checkpoints import reference
from tests.smg.stack import KEY, smg_before
from tests.system.service import Service, serve
from tests.system.test_system_edge import edge

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(900)]

MODEL = "smollm2"
TEMPLATE = Path(__file__).parent / "tools.jinja"
ANSWERS = "answers.json"
MORE = {
    "guidellm_client.py": ("model",),
    "lm_eval_client.py": ("model", ANSWERS),
    "sglang_bench_client.py": ("model",),
}  # of a folder: they read the tokenizer
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "true"}  # no prices from the network


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, with a chat template that has a place for tools."""
    made = tmp_path_factory.mktemp("model")
    for path in real_model.checkpoint().iterdir():
        (made / path.name).symlink_to(path)
    (made / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    options = ("--model", str(folder), "--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "2048")
    with serve(*options) as made:
        yield made


@pytest.fixture(scope="module")
def grpc(service: Service) -> list[str]:
    """What a client of gRPC is told."""
    return [service.address, MODEL]


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[list[str]]:
    """What a client of the HTTP edge is told."""
    with edge("--address", service.address) as url:
        yield [url, MODEL]


@pytest.fixture(scope="module")
def smg(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What a client of the Shepherd Model Gateway is told."""
    options = ("--dtype", "float32", "--max-model-len", "2048")
    with smg_before(1, tmp_path_factory.mktemp("smg"), *options, program=smg_program(), model=str(folder)) as stack:
        yield [str(stack.http.base_url), MODEL, KEY]


@pytest.mark.parametrize("client", clients(), ids=lambda client: client.script)
def test_a_client_does_what_the_page_says(
    client: Client, request: pytest.FixtureRequest, folder: Path, tmp_path: Path
) -> None:
    door = request.getfixturevalue(client.door.lower())
    (tmp_path / "model").symlink_to(folder)
    more = [str(tmp_path / name) for name in MORE.get(client.script, ())]
    environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **OFFLINE}
    command = [*client.command(), *door, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert tuple(done.stdout.splitlines()) == client.seen, done.stdout + done.stderr[-4000:]
    assert done.returncode == 0, done.stderr[-4000:]
    if ANSWERS in MORE.get(client.script, ()):
        compare(json.loads((tmp_path / ANSWERS).read_text()), folder)


def compare(found: list[dict[str, object]], folder: Path) -> None:
    """Holds log likelihoods to those of transformers."""
    model, tokenizer = reference(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for one in found:
        before = len(tokenizer.encode(str(one["context"])).ids)
        ids = tokenizer.encode(f"{one['context']}{one['continuation']}").ids
        with torch.inference_mode():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = sum(float(scores[at - 1, ids[at]]) for at in range(before, len(ids)))
        assert one["logprob"] == pytest.approx(wanted, abs=1e-3), one
