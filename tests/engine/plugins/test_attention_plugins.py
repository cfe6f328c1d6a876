"""An attention of another package in a model of our own: the tokens of the definition, with everything else on."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.plugins.loading import load_plugins
from sluice_server.engine.request import SamplingParams
from tests.engine.plugins.test_sampling_plugins import DRAFTS, SHAPE, make_engine, run
from tests.engine.test_engine_oracle import ROOMY, TIGHT, some_prompts
from tests.oracle.checkpoints import make_checkpoint, reference
from tests.plugins.installed import EXAMPLE, write_package

ENTRIES = "[sluice.attention]\nhalved = sluice_plugin_example.attention:HALVED\nodd = odd_attention:ODD\n"
ODD = "from sluice_server.engine.plugins.interface import AttentionPlugin\nODD = AttentionPlugin(0, print)\n"
NUM = 10


@pytest.fixture(scope="module", autouse=True)
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example package, as if installed, and one of another version."""
    target = write_package(tmp_path_factory.mktemp("site"), "odd_attention", ENTRIES, ODD)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(target)
        patched.syspath_prepend(EXAMPLE)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE)


@torch.inference_mode()
def defined(directory: Path, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers' model with half the factor of scores."""
    oracle, ids = reference(directory), list(prompt)
    scales = [layer.self_attn.scaling for layer in oracle.model.layers]
    try:
        for layer, scale in zip(oracle.model.layers, scales, strict=True):
            layer.self_attn.scaling = scale / 2
        for _ in range(NUM):
            ids.append(int(oracle(torch.tensor([ids])).logits[0, -1].argmax()))
    finally:
        for layer, scale in zip(oracle.model.layers, scales, strict=True):
            layer.self_attn.scaling = scale
    return ids[len(prompt) :]


@pytest.mark.parametrize("config", [ROOMY, TIGHT, DRAFTS], ids=["roomy", "tight", "drafts"])
def test_tokens_are_those_of_the_definition(config: EngineConfig, checkpoint: Path) -> None:
    prompts = some_prompts(SHAPE.vocab, 4)
    greedy = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True)
    asked = {name: (one, greedy) for name, one in prompts.items()}
    engine = make_engine(checkpoint, config, "halved")
    for _ in range(2):  # the second time behind cached prefixes
        found, failed = run(engine, asked)
        assert not failed
        assert {name: found[name, 0] for name in asked} == {one: defined(checkpoint, prompts[one]) for one in asked}
    plain, _ = run(make_engine(checkpoint, ROOMY, ""), asked)
    assert plain != found


def test_it_is_part_of_what_the_model_is_called(checkpoint: Path) -> None:
    """Cached blocks of one attention are of no use to the other."""
    config = read_config(checkpoint)
    found = load_plugins("halved", config)
    assert found.identity.startswith("odd_attention 1.0 ") and load_plugins("", config).identity == ""
    assert found.notes == ("sluice.attention plugin 'halved' of odd_attention 1.0 is loaded",)


def test_another_version_and_a_second_one_are_refused(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    with pytest.raises(ServiceError, match=r"'odd' of odd_attention 1\.0 was written for version 0 of the interface"):
        load_plugins("odd", config)
    with pytest.raises(ServiceError, match="'halved' and 'odd' would both compute attention: allow one of them"):
        load_plugins("halved,odd", config)


def test_ranks_refuse_it(checkpoint: Path) -> None:
    config = dataclasses.replace(ROOMY, sum_shards=2)  # computed as two ranks would
    with pytest.raises(
        ServiceError, match="--plugins: LlamaForCausalLM is a plugin's, whose tensors ranks cannot share out"
    ):
        make_engine(checkpoint, config, "halved")
