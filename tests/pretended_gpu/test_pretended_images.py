"""Images on a pretended GPU: the tokens of transformers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine import build
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import SamplingParams
from tests.engine.test_images import limits_for, run
from tests.engine.test_whole_images import BARRED
from tests.oracle.image_families import FAMILIES, Family, Parts
from tests.pretended_gpu.cuda import pretend
from tests.pretended_gpu.device_ranks import over_gpus
from tests.pretended_gpu.test_pretended_engines import CONFIG

ONE = dataclasses.replace(CONFIG, max_num_batched_tokens=8, max_num_seqs=1)
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logit_bias=BARRED)
MISTRAL3 = FAMILIES["mistral3"]


def config_of(family: Family) -> Any:  # noqa: ANN401 # untyped
    """The family's configuration with one layer, and heads of a size that kernels have."""
    config = family.config()
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.num_attention_heads, text.num_key_value_heads, text.head_dim = 128, 2, 2, 64
    text.num_hidden_layers = 1 if family is MISTRAL3 else text.num_hidden_layers
    if hasattr(vision, "out_hidden_size"):
        vision.out_hidden_size = text.hidden_size
    for name in ("rope_scaling", "rope_parameters"):
        if "mrope_section" in (getattr(text, name, None) or {}):
            getattr(text, name)["mrope_section"] = [12, 12, 8]
    return config


def parts_of(family: Family) -> Parts:
    """A prompt with two images, longer than a step."""
    wide, tall = family.picture(1, (1, 2)), family.picture(2, (2, 1))
    return [5, tall, 6, wide, 7]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", [MISTRAL3, FAMILIES["qwen2_5_vl"]], ids=lambda one: one.name)
def test_tokens_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    """Pixels come in memory of the host; all that is computed of them is on the device."""
    reference, parts = family.make(tmp_path, config=config_of(family)), parts_of(family)
    with pretend() as gpu:
        engine = build.build_engine(ONE, read_served(tmp_path), tmp_path, limits_for(tmp_path, ONE)).engine
        (found,) = run(engine, family.request("a", parts, params=GREEDY)).values()
    assert found == family.greedy(reference, parts, found)
    assert gpu.replays > 0 or family is not MISTRAL3  # positions in three directions are computed step by step


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", [MISTRAL3, FAMILIES["qwen2_5_vl"]], ids=lambda one: one.name)
def test_tokens_over_two_gpus(family: Family, tmp_path: Path) -> None:
    """The rank without a vision tower is told the rows."""
    reference, parts = family.make(tmp_path, config=config_of(family)), parts_of(family)
    config = dataclasses.replace(ONE, tensor_parallel_size=2, threads=1)
    with pretend() as gpu, over_gpus(gpu, tmp_path, config, limits=limits_for(tmp_path, config)) as ranks:
        (found,) = run(ranks.engine, family.request("a", parts, params=GREEDY)).values()
    assert found == family.greedy(reference, parts, found)
