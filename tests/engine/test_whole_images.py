"""Images whose tokens see one another, in prompts against `transformers`: chunks, batches, cache hits, preemption."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import SamplingParams
from tests.engine.test_engine_oracle import ROOMY, TIGHT
from tests.engine.test_images import cached, make_engine, run, steps
from tests.oracle.image_families import BREAKS, GEMMA3, GEMMA3_GRID, IMAGE_ID, OTHER_ID, Parts, Picture

NUM = 12
BARRED = tuple((one, -100.0) for one in (IMAGE_ID, OTHER_ID))
GREEDY = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True, logit_bias=BARRED)
SCARCE = dataclasses.replace(TIGHT, kv_cache_tokens=96)
CONFIGS = {
    "roomy": ROOMY,
    "chunks of 7": dataclasses.replace(ROOMY, max_num_batched_tokens=7),  # fewer than an image has
    "chunks of 18": dataclasses.replace(ROOMY, max_num_batched_tokens=18),
    "chunks of 64": dataclasses.replace(ROOMY, max_num_batched_tokens=64),
    "chunks of 512": dataclasses.replace(ROOMY, max_num_batched_tokens=512),
    "preempted": SCARCE,
    "one image kept": dataclasses.replace(ROOMY, encoder_cache_bytes=4 * 64 * 16, encoder_share=0.01),
}
Made = tuple[Path, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint and its reference."""
    path = tmp_path_factory.mktemp("gemma3")
    return path, GEMMA3.make(path)


def picture(seed: int) -> Picture:
    """An image."""
    return GEMMA3.picture(seed, GEMMA3_GRID)


def around(one: Picture) -> list[int | Picture]:
    """An image as a chat has it."""
    return [OTHER_ID, one, BREAKS[0]]


PROMPTS: dict[str, Parts] = {
    "one": [5, 6, *around(picture(1)), 7, 8],
    "first": [*around(picture(2)), 9],
    "bare": [picture(2), 9],
    "two": [5, *around(picture(1)), 6, *around(picture(4)), 7, 8, 9, 4, 3, 6, 7, 5, 8, 4],
    "beside each other": [5, *around(picture(4)), *around(picture(1)), 7],
    "same twice": [5, *around(picture(1)), 6, *around(picture(1)), 7],
    "far": [5, 6, 7, 8] * 6 + [*around(picture(3)), 7],
    "text": [5, 6, 9, 8, 7, 6, 5, 4, 3, 2, 9, 8],
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_tokens_equal_those_of_transformers(made: Made, config: EngineConfig) -> None:
    path, reference = made
    engine = make_engine(path, config)
    if config is SCARCE:  # rows that are there let all requests in at once
        for seed in range(1, 5):
            run(engine, GEMMA3.request(f"before {seed}", [9, 9, picture(seed), 9], params=GREEDY))
    found = run(engine, *(GEMMA3.request(name, parts, params=GREEDY) for name, parts in PROMPTS.items()))
    for name, parts in PROMPTS.items():
        assert len(found[name]) == NUM and found[name] == GEMMA3.greedy(reference, parts, found[name]), name
    assert engine.scheduler.num_preemptions > 0 or config is not SCARCE


def test_streams_decode_beside_images_that_are_larger_than_a_step(made: Made) -> None:
    """Each step computes an image whole, or none of it; both go on."""
    path, reference = made
    engine = make_engine(path, CONFIGS["chunks of 7"])
    streams = [GEMMA3.request(f"stream {at}", [5, 6, at + 3], params=GREEDY) for at in range(5)]
    found = run(engine, *streams, *(GEMMA3.request(name, PROMPTS[name], params=GREEDY) for name in ("two", "far")))
    for name in ("two", "far"):
        assert found[name] == GEMMA3.greedy(reference, PROMPTS[name], found[name]), name


def test_a_step_is_longer_than_its_budget_by_one_image_at_most(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = made
    engine = make_engine(path, CONFIGS["chunks of 7"])
    plan, sizes = engine.scheduler.plan, []

    def planned(*given: Any) -> Any:  # noqa: ANN401 # of the scheduler
        found = plan(*given)
        if found is not None:
            sizes.append(found.num_tokens)
        return found

    monkeypatch.setattr(engine.scheduler, "plan", planned)
    run(engine, *(GEMMA3.request(name, parts, params=GREEDY) for name, parts in PROMPTS.items()))
    assert 16 <= max(sizes) < 7 + 16


def test_blocks_are_shared_up_to_the_first_that_differs(made: Made) -> None:
    """What is left of an image behind a hit that ends within it is computed with its rest in the cache."""
    path, reference = made
    engine = make_engine(path)  # of 8 tokens a block
    parts: Parts = [5, 6, 7, picture(1), 8, 9, picture(2), 3, 4]
    assert cached(engine, GEMMA3.request("a", parts, params=GREEDY))[0] == 0
    cases: list[tuple[str, Parts, int]] = [  # and how many tokens are the same, the last one left out
        ("equal", parts, 38),
        ("ends inside an image", [5, 6, 7, picture(1), 8], 19),
        ("another second image", [5, 6, 7, picture(1), 8, 9, picture(3), 3, 4], 21),
        ("another question", [5, 6, 7, picture(1), 8, 9, picture(2), 2, 1], 37),
    ]
    for name, asked, num in cases:
        found, tokens = cached(engine, GEMMA3.request(name, asked, params=GREEDY))
        assert (found, tokens) == (num // 8 * 8, GEMMA3.greedy(reference, asked, tokens)), name


def test_several_outputs_share_an_image(made: Made) -> None:
    path, _ = made
    params = dataclasses.replace(GREEDY, n=3, temperature=1.0, seed=7)
    alone = run(make_engine(path), GEMMA3.request("a", PROMPTS["one"], params=params))
    assert run(make_engine(path, CONFIGS["chunks of 7"]), GEMMA3.request("a", PROMPTS["one"], params=params)) == alone


def test_text_has_the_same_bits_beside_images(made: Made) -> None:
    path, _ = made
    text = GEMMA3.request("text", PROMPTS["text"], params=dataclasses.replace(GREEDY, logprobs=2))
    found = []
    for names in ((), ("one", "two")):
        beside = [GEMMA3.request(name, PROMPTS[name], params=GREEDY) for name in names]
        events = [event for step in steps(make_engine(path), text, *beside) for event in step.sampled]
        found.append([one.logprobs for one in events if one.request_id == "text"])
    assert found[0] == found[1] and len(found[0]) == NUM


def test_text_must_follow_an_image(made: Made) -> None:
    engine = make_engine(made[0])
    with pytest.raises(ServiceError, match=r"images\[1\]: ends the prompt; text must follow"):
        engine.add(GEMMA3.request("a", [5, picture(1), 6, picture(2)], params=GREEDY))
    assert not engine.has_work
