"""Images of any size in prompts against `transformers`, with chunks, batches, cache hits and preemption."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.registry import read_served, traits_of
from sluice_server.engine.models.rope import Rotations
from sluice_server.engine.request import SamplingParams
from tests.engine.test_engine_oracle import ROOMY, TIGHT
from tests.engine.test_images import cached, make_engine, run, steps
from tests.oracle.image_families import FAMILIES, IMAGE_ID, OTHER_ID, Family, Parts, Picture

NUM = 12
GREEDY = SamplingParams(
    max_tokens=NUM, temperature=0.0, ignore_eos=True, logit_bias=((IMAGE_ID, -100.0), (OTHER_ID, -100.0))
)
SCARCE = dataclasses.replace(TIGHT, kv_cache_tokens=72)  # two prompts at full length
CONFIGS = {
    "roomy": ROOMY,
    "chunks of 7": dataclasses.replace(ROOMY, max_num_batched_tokens=7),
    "chunks of 64": dataclasses.replace(ROOMY, max_num_batched_tokens=64),
    "preempted": SCARCE,
}
Made = tuple[Family, Path, Any]


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=list(FAMILIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint of each family and its reference."""
    family: Family = request.param
    path = tmp_path_factory.mktemp(family.name)
    return family, path, family.make(path)


def pictures(family: Family) -> tuple[Picture, Picture, Picture]:
    """Images of several shapes."""
    square, wide, tall = (family.picture(seed, grid) for seed, grid in ((1, (4, 4)), (2, (2, 6)), (3, (5, 1))))
    return square, wide, tall


def prompts(family: Family) -> dict[str, Parts]:
    """Prompts with images of several shapes, and one without."""
    square, wide, tall = pictures(family)
    return {
        "one": [5, 6, square, 7, 8],
        "first": [wide, 9],
        "last": [4, 3, 9, tall],
        "two": [5, tall, 6, wide, 7, 8, 9],
        "same twice": [5, wide, 6, wide, 7],
        "text": [5, 6, 9, 8, 7, 6, 5, 4, 3, 2, 9, 8],
    }


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_tokens_equal_those_of_transformers(made: Made, config: EngineConfig) -> None:
    family, path, reference = made
    engine = make_engine(path, config)
    asked = {name: family.request(name, parts, params=GREEDY) for name, parts in prompts(family).items()}
    if config is SCARCE:  # rows that are there let all requests in at once
        for one in pictures(family):
            run(engine, family.request("before", [9, 9, one], params=GREEDY))
    found = run(engine, *asked.values())
    for name, parts in prompts(family).items():
        assert len(found[name]) == NUM and found[name] == family.greedy(reference, parts, found[name]), name
    assert engine.scheduler.num_preemptions > 0 or config is not SCARCE


def test_blocks_are_shared_up_to_the_first_that_differs(made: Made) -> None:
    family, path, reference = made
    engine = make_engine(path)  # of 8 tokens a block
    square, wide, tall = (family.picture(seed, grid) for seed, grid in ((1, (4, 4)), (2, (2, 6)), (3, (6, 2))))
    turned = Picture(wide.numbers, (6, 2))  # the same numbers in another shape
    parts: Parts = [5, 6, 7, square, 8, 9, wide, 3, 4]
    assert cached(engine, family.request("a", parts, params=GREEDY))[0] == 0
    first = 3 + len(family.ids(square.grid))
    both = first + 2 + len(family.ids(wide.grid))
    cases: list[tuple[str, Parts, int]] = [  # and how many tokens are the same, the last one left out
        ("equal", parts, both + 1),
        ("ends inside an image", [5, 6, 7, square, 8], first),
        ("another second image", [5, 6, 7, square, 8, 9, tall, 3, 4], first + 2),
        ("another shape", [5, 6, 7, square, 8, 9, turned, 3, 4], first + 2),
        ("another question", [5, 6, 7, square, 8, 9, wide, 2, 1], both),
    ]
    for name, asked, num in cases:
        found, tokens = cached(engine, family.request(name, asked, params=GREEDY))
        assert (found, tokens) == (num // 8 * 8, family.greedy(reference, asked, tokens)), name


def test_text_has_the_same_bits_beside_images(made: Made) -> None:
    family, path, _ = made
    text = family.request("text", prompts(family)["text"], params=dataclasses.replace(GREEDY, logprobs=2))
    beside = [family.request(str(num), prompts(family)["two"], params=GREEDY) for num in range(3)]
    found = []
    for others in ([], beside):
        events = [event for step in steps(make_engine(path), text, *others) for event in step.sampled]
        found.append([one.logprobs for one in events if one.request_id == "text"])
    assert found[0] == found[1] and len(found[0]) == NUM


def test_equal_positions_in_all_directions_turn_as_one_does(made: Made) -> None:
    config = read_served(made[1])
    rotations, at = Rotations(config, traits_of(config), 64, torch.device("cpu")), torch.arange(5, 25)
    if rotations.axes is not None:
        plain, turned = rotations.of(at), rotations.of(at, [(3, at[3:9].repeat(3, 1))])
        assert all(torch.equal(a, b) for a, b in zip(plain, turned, strict=True))


def test_grids_that_do_not_fit_are_refused_by_name(made: Made) -> None:
    family, path, _ = made
    engine = make_engine(path)
    request = family.request("a", prompts(family)["one"], params=GREEDY)
    (image,) = request.images
    for change, says in (
        ({"grid": (0, 16)}, r"images\[0\].grid: is \(0, 16\)"),
        ({"grid": (4, 5)}, r"images\[0\].pixels: have"),
        ({"grid": (1 << 10, 1 << 10)}, "may have"),
        ({"grid": (-4, -4)}, "may have"),
    ):
        with pytest.raises(ServiceError, match=says):
            engine.add(dataclasses.replace(request, images=(dataclasses.replace(image, **change),)))  # type: ignore[arg-type]
    assert not engine.has_work
