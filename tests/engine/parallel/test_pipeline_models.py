"""Models cut into stages: the logits of transformers, and the bits of one rank, as a pipeline changes no sum."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats.packer import LinearPacker
from tests.engine.models.test_model_oracle import SHAPES as MORE
from tests.engine.parallel.stage_threads import run_members
from tests.engine.parallel.test_rank_models import BLOCK, CPU, CUTS, SHAPES, TOKENS, computed, token_ids
from tests.oracle.checkpoints import make_checkpoint, reference

QUICK = ("llama-biases", "gemma2", "qwen2-shared", "gpt-oss")
FORMATS = {
    "float32": (torch.float32, ""),
    "bfloat16": (torch.bfloat16, ""),
    "int8": (torch.float32, "int8"),
    "int4": (torch.float32, "int4"),
}
LONG = pytest.mark.long


def load(path: Path, ranks: Ranks | None, form: str = "float32") -> Model:
    dtype, weights = FORMATS[form]
    return load_model(path, read_config(path), dtype, CPU, TOKENS, LinearPacker(weights), ranks=ranks)


def over(path: Path, shape: ParallelShape, form: str = "float32") -> Tensor:
    """The logits of rank 0 of a group."""

    def logits(ranks: Ranks) -> Tensor | None:
        return computed(load(path, ranks, form))

    found = run_members(shape, logits)[0]
    assert found is not None
    return found


def marked(names: tuple[str, ...]) -> list[object]:
    return [*names, *(pytest.param(name, marks=LONG) for name in SHAPES if name not in names)]


def wanted(path: Path) -> Tensor:
    with torch.inference_mode():
        logits = reference(path)(torch.tensor([token_ids(read_config(path).vocab_size)])).logits[0]
    return torch.cat((logits[: CUTS[0] + CUTS[1]], logits[-3:]))


@pytest.mark.parametrize("tensor_size", [1, 2])
@pytest.mark.parametrize("name", marked(QUICK))
def test_logits_over_stages_equal_transformers(name: str, tensor_size: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES[name])
    found = over(tmp_path, ParallelShape(tensor_size, pipeline_size=2))
    torch.testing.assert_close(found, wanted(tmp_path), atol=2e-4, rtol=1e-3)
    assert torch.equal(found.argmax(-1), wanted(tmp_path).argmax(-1))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MORE if MORE[name].layers > 1])
def test_further_architectures_over_stages(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, MORE[name])
    torch.testing.assert_close(over(tmp_path, ParallelShape(pipeline_size=2)), wanted(tmp_path), atol=2e-4, rtol=1e-3)


@pytest.mark.skipif(not builds.is_available(), reason="torch's operators promise no bits")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", marked(("llama-biases", "gpt-oss")))
def test_stages_change_no_bit(name: str, form: str, tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPES[name], layers=4 if name != "gemma2" else 3)
    make_checkpoint(tmp_path, shape)
    alone = computed(load(tmp_path, None, form))
    for stages in (2, 3):
        assert torch.equal(over(tmp_path, ParallelShape(pipeline_size=stages), form), alone), f"{stages} stages"


@pytest.mark.skipif(not builds.is_available(), reason="torch's operators promise no bits")
@pytest.mark.parametrize("form", ["bfloat16", "int4"])
def test_stages_of_tensor_ranks_have_the_bits_of_as_many_sums(form: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama-biases"])
    found = over(tmp_path, ParallelShape(2, pipeline_size=2, sum_shards=4), form)
    assert torch.equal(found, over(tmp_path, ParallelShape(sum_shards=4), form))


def test_a_stage_has_its_layers_and_their_keys_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dataclasses.replace(SHAPES["llama-biases"], layers=3))
    last, first = run_members(ParallelShape(pipeline_size=2), lambda ranks: load(tmp_path, ranks))
    whole = load(tmp_path, None)
    assert (first.layers, last.layers) == (range(1), range(1, 3))
    assert len(first.new_cache(2, BLOCK)) == 1 and len(last.new_cache(2, BLOCK)) == 2
    assert first.token_bytes(torch.float32) + last.token_bytes(torch.float32) == whole.token_bytes(torch.float32)
    assert len(first.embeddings) == whole.config.vocab_size and len(last.embeddings) == 0
    assert first.num_parameters == last.num_parameters == whole.num_parameters
    with pytest.raises(AssertionError, match="only the last stage has the head"):
        first.logits(torch.zeros(1, 64))


@pytest.mark.skipif(not builds.is_available(), reason="torch's operators keep weights as they are mapped from the file")
@LONG
@pytest.mark.parametrize("member", [0, 1])
def test_a_stage_takes_the_memory_of_its_share(member: int, tmp_path: Path) -> None:
    """Also at its peak, while it is loaded."""
    program = [sys.executable, "-m", "tests.engine.parallel.stage_memory", str(tmp_path), str(member)]
    found = subprocess.run(program, capture_output=True, text=True, check=True, timeout=120)
    taken, share = map(int, found.stdout.split())
    assert 0.9 < taken / share < 1.1
