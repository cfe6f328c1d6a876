"""Images in prompts against `transformers`, with chunks, batches, cache hits, preemption and resumption."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_server.engine import build
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine, StepEvents
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.images import Grid, PromptImage
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.models.vision import encoding
from sluice_server.engine.models.vision.config import read_vision
from sluice_server.engine.models.vision.encoding import Encoder, Encoding
from sluice_server.engine.request import EngineRequest, Limits, Pooling, SamplingParams
from tests.engine.test_engine_oracle import ROOMY, TIGHT
from tests.oracle.vision_checkpoints import IMAGE_ID, NUM_PATCHES, make_llava

NUM = 12
GRID = (4, 4)
GREEDY = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True, logit_bias=((IMAGE_ID, -100.0),))
CONFIGS = {
    "roomy": ROOMY,
    "chunks of 7": dataclasses.replace(ROOMY, max_num_batched_tokens=7),
    "chunks of 64": dataclasses.replace(ROOMY, max_num_batched_tokens=64),
    "preempted": TIGHT,
    "drafts": dataclasses.replace(ROOMY, speculation="ngram"),
    "one image kept": dataclasses.replace(ROOMY, encoder_cache_bytes=4 * 64 * NUM_PATCHES, encoder_share=0.01),
    "none fits": dataclasses.replace(TIGHT, encoder_cache_bytes=0, max_num_batched_tokens=7),
}
Parts = list[int | torch.Tensor]  # of a prompt: ids, and pixels of images


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint and its reference."""
    path = tmp_path_factory.mktemp("llava")
    return path, make_llava(path, "clip")


def image(seed: int) -> torch.Tensor:
    """The pixels of an image."""
    return torch.randn(3, 28, 28, generator=torch.Generator().manual_seed(seed))


def asking(name: str, parts: Parts, **fields: Any) -> EngineRequest:  # noqa: ANN401 # of EngineRequest's types
    """A request with these parts in its prompt."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            images.append(PromptImage.at(len(ids), NUM_PATCHES, GRID, part.numpy().astype("<f4").tobytes()))
            ids += [IMAGE_ID] * NUM_PATCHES
    return EngineRequest(name, tuple(ids), fields.pop("params", GREEDY), images=tuple(images), **fields)


def limits_for(path: Path, config: EngineConfig) -> Limits:
    """The limits of an engine that takes images."""
    return dataclasses.replace(limits_of(config, read_served(path), 1 << 20), images=read_vision(path).form)


def make_engine(path: Path, config: EngineConfig = ROOMY) -> Engine:
    """An engine that takes images."""
    return build.build_engine(config, read_served(path), path, limits_for(path, config)).engine


def steps(engine: Engine, *requests: EngineRequest) -> Iterator[StepEvents]:
    """Yields the events of every step until these requests have ended."""
    for one in requests:
        engine.add(one)
    while engine.has_work:
        events = engine.step()
        engine.scheduler.check()
        assert not events.failed
        yield events
    assert engine.scheduler.cache.pool.num_held == 0


def run(engine: Engine, *requests: EngineRequest) -> dict[str, list[int]]:
    """Tokens of every output, by request; all are sent at once."""
    out: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for events in steps(engine, *requests):
        for event in events.sampled:
            out[event.request_id].extend(event.token_ids)
    return out


def cached(engine: Engine, request: EngineRequest) -> tuple[int, list[int]]:
    """How many tokens of a request were cached, and its tokens."""
    events = [event for step in steps(engine, request) for event in step.sampled]
    assert events[0].admission is not None
    return events[0].admission.num_cached, [token for event in events for token in event.token_ids]


@torch.inference_mode()
def oracle(reference: Any, parts: Parts) -> list[int]:  # noqa: ANN401 # untyped
    """Greedy tokens of `transformers` behind these parts."""
    ids = [*asking("", parts).prompt_ids]
    pixels = [part for part in parts if isinstance(part, torch.Tensor)]
    given = {"pixel_values": torch.stack(pixels)} if pixels else {}
    for _ in range(NUM):
        ids.append(int(reference(torch.tensor([ids]), **given).logits[0, -1, :IMAGE_ID].argmax()))
    return ids[-NUM:]


PROMPTS: dict[str, Parts] = {
    "one": [5, 6, image(1), 7, 8],
    "first": [image(2), 9],
    "last": [4, 3, 9, image(3)],
    "two": [5, image(1), 6, image(4), 7],
    "beside each other": [5, image(4), image(1), 7],
    "same twice": [5, image(1), 6, image(1), 7],
    "text": [5, 6, 9, 8, 7, 6, 5, 4, 3, 2, 9, 8],
}


@pytest.mark.usefixtures("preempts_at_once")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_tokens_equal_those_of_transformers(made: tuple[Path, Any], config: EngineConfig) -> None:
    path, reference = made
    engine = make_engine(path, config)
    if config is TIGHT:  # rows that are there let all requests in at once
        for seed in range(1, 5):
            run(engine, asking(f"before {seed}", [9, 9, image(seed)]))
    found = run(engine, *(asking(name, parts) for name, parts in PROMPTS.items()))
    for name, parts in PROMPTS.items():
        assert found[name] == oracle(reference, parts), name
    assert engine.scheduler.num_preemptions > 0 or config is not TIGHT


def test_blocks_are_shared_up_to_the_first_that_differs(made: tuple[Path, Any]) -> None:
    path, _ = made
    engine = make_engine(path)  # of 8 tokens a block
    parts: Parts = [5, 6, 7, 8, 9, 5, 6, 7, 1, 2, image(1), 3, 4, 5, image(2), 6, 7]
    whole, tokens = cached(engine, asking("a", parts))
    assert whole == 0
    other: Parts = [*parts[:-3], image(3), 6, 7]
    moved: Parts = [*parts[:10], 9, image(1), 3, 4, image(2), 6, 7]
    cases: list[tuple[str, Parts, int]] = [
        ("equal", parts, 40),
        ("ends inside an image", parts[:14], 24),  # 29 tokens, of which the last is computed
        ("another second image", other, 24),  # the block of 24 to 31 has the first three tokens of it
        ("another first image", [*parts[:10], image(9), *parts[11:]], 8),
        ("moved by one", moved, 8),
        ("images changed places", [*parts[:10], image(2), 3, 4, 5, image(1), 6, 7], 8),
    ]
    for name, asked, num in cases:
        request = asking(name, asked)
        found, got = cached(engine, request)
        assert found == num, name
        assert (got == tokens) is (name == "equal"), name
        assert got == cached(make_engine(path), request)[1], name
    ids = dataclasses.replace(asking("other tenant", parts), cache_salt=b"another")
    assert cached(engine, ids) == (0, tokens)


def test_an_image_is_encoded_once(made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = made
    encoded: list[torch.Tensor] = []
    begin = Encoder.begin

    def counting(encoder: Encoder, pixels: torch.Tensor, grid: Grid) -> Encoding:
        encoded.append(pixels)
        return begin(encoder, pixels, grid)

    monkeypatch.setattr(Encoder, "begin", counting)
    engine = make_engine(path, CONFIGS["chunks of 7"])
    params = dataclasses.replace(GREEDY, n=3, temperature=1.0, seed=7)
    run(engine, asking("a", PROMPTS["one"], params=params), asking("b", [9, image(1)]), asking("c", PROMPTS["two"]))
    assert len(encoded) == 2


def test_a_stream_gets_a_token_in_every_step_while_an_image_is_encoded(
    made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = made
    monkeypatch.setattr(encoding, "WORK", 0)  # 16 rows a part
    engine = make_engine(path, dataclasses.replace(ROOMY, encoder_share=0.01))
    stream = asking("stream", [5, 6, 7], params=dataclasses.replace(GREEDY, max_tokens=40))
    waited = 0
    for at, events in enumerate(steps(engine, stream)):
        got = {one.request_id for one in events.sampled}
        if at == 3:
            engine.add(asking("image", PROMPTS["one"]))
        if 3 < at <= 12:
            assert got == {"stream"}
            waited += 1
    assert waited == 9
    found = run(engine, asking("again", PROMPTS["one"]))
    assert found["again"] == oracle(reference, PROMPTS["one"])


def test_an_image_that_cannot_be_encoded_fails_its_own_request(
    made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = made
    engine = make_engine(path)
    begin = Encoder.begin

    def failing(encoder: Encoder, pixels: torch.Tensor, grid: Grid) -> Encoding:
        if torch.equal(pixels, image(4).flatten()):
            raise RuntimeError("no memory")
        return begin(encoder, pixels, grid)

    monkeypatch.setattr(Encoder, "begin", failing)
    engine.add(asking("good", PROMPTS["one"]))
    engine.add(asking("bad", PROMPTS["two"]))
    failed, tokens = [], []
    while engine.has_work:
        events = engine.step()
        failed += events.failed
        tokens += [token for one in events.sampled for token in one.token_ids]
    ((name, error),) = failed
    assert (name, error.code) == ("bad", Code.INTERNAL) and tokens == oracle(reference, PROMPTS["one"])
    assert engine.scheduler.cache.pool.num_held == 0


def test_an_output_continues_after_the_tokens_that_were_received(made: tuple[Path, Any]) -> None:
    path, _ = made
    request = asking("a", PROMPTS["two"])
    expected = run(make_engine(path), request)["a"]
    for num in (1, 5):
        resumed = dataclasses.replace(request, resume_ids=(tuple(expected[:num]),))
        assert run(make_engine(path), resumed)["a"] == expected[num:]


def test_beams_and_samples_do_not_depend_on_chunks(made: tuple[Path, Any]) -> None:
    path, _ = made
    for params in (
        dataclasses.replace(GREEDY, n=3, temperature=1.0, seed=4),
        dataclasses.replace(GREEDY, beam_width=3, n=2, logit_bias=()),
        dataclasses.replace(GREEDY, prompt_logprobs=1),
    ):
        request = asking("a", PROMPTS["two"], params=params)
        wide, narrow = (run(make_engine(path, CONFIGS[name]), request)["a"] for name in ("roomy", "chunks of 7"))
        assert sorted(wide) == sorted(narrow) and wide


def test_beams_name_blocks_by_their_images(made: tuple[Path, Any]) -> None:
    path, _ = made
    params = dataclasses.replace(GREEDY, beam_width=3, logit_bias=())
    engine = make_engine(path)
    for seed in (1, 9):
        request = asking(f"beams {seed}", [5, 6, image(seed), 7], params=params)
        assert run(engine, request) == run(make_engine(path), request)
    index = engine.scheduler.cache.index
    num = len(index)
    run(engine, dataclasses.replace(request, request_id="private", bypasses_cache=True))
    assert len(index) == num > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"images": ()}, "has 16 ids 110, which stand for images; those sent take 0"),
        ({"first": 1}, "the prompt has not 16 ids 110 of an image from position 1 on"),
        ({"first": -2}, "may begin at 0"),
        ({"num_tokens": 15}, "images have 16"),
        ({"digest": b"short"}, "has 5 bytes; it must have 32"),
        ({"pixels": b"1234"}, "have 4 bytes; the model takes 9408"),
        ({"pooling": Pooling.LAST}, "vectors"),
        ({"is_open": True}, "keep_input_open"),
        ({"num": 17}, "are 17; at most 16"),
    ],
    ids=str,
)
def test_bad_images_are_refused_by_name(made: tuple[Path, Any], change: dict[str, Any], says: str) -> None:
    engine = make_engine(made[0])
    request = asking("a", PROMPTS["one"])
    of_image = {name: value for name, value in change.items() if name in ("first", "num_tokens", "digest", "pixels")}
    of_request = {name: value for name, value in change.items() if name in ("images", "pooling", "is_open")}
    images = (dataclasses.replace(request.images[0], **of_image),) * change.get("num", 1)
    with pytest.raises(ServiceError) as caught:
        engine.add(dataclasses.replace(request, **{"images": images, **of_request}))
    assert caught.value.code in (Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED)
    assert says in caught.value.message
    assert not engine.has_work
    assert run(engine, asking("next", PROMPTS["one"]))["next"]


def test_images_are_refused_where_none_are_taken(made: tuple[Path, Any]) -> None:
    path, _ = made
    config = read_served(path)
    engine = build.build_engine(ROOMY, config, path, limits_of(ROOMY, config, 1 << 20)).engine
    with pytest.raises(ServiceError) as caught:
        engine.add(asking("a", PROMPTS["one"]))
    assert caught.value.code is Code.UNIMPLEMENTED
    assert "does not take images" in caught.value.message
