"""Streamed text equals the text decoded at once, for any ids; stop strings are found at any position."""

import random

import pytest

from sluice_server.services.detokenizer.stops import StopMatcher
from sluice_server.services.detokenizer.stream import OutputText
from sluice_server.services.tokenizer.encoding import TextEncoder
from tests.oracle.tokenizers import FAMILIES

NUM = 2000


@pytest.fixture(scope="module", params=list(FAMILIES))
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    directory = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](directory)
    return TextEncoder.load(directory)


def stream(encoder: TextEncoder, ids: list[int], rng: random.Random, skip: bool = True) -> str:
    """The text of ids that are pushed in random pieces."""
    output, text, at = OutputText(encoder, skip_special_tokens=skip), "", 0
    while at < len(ids):
        num = rng.randrange(1, 5)
        delta = output.push(ids[at : at + num])
        assert delta.num_consumed == len(ids[at : at + num])
        text += delta.text
        at += num
    return text + output.finish()


def test_streamed_text_is_whole_decoding_of_random_ids(encoder: TextEncoder) -> None:
    rng = random.Random(5)
    size = encoder.tokenizer.get_vocab_size()
    for number in range(NUM):
        ids = [rng.randrange(size) for _ in range(rng.randrange(1, 40))]
        skip = number % 2 == 0
        assert stream(encoder, ids, rng, skip) == encoder.tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_broken_characters_without_end_stay_linear_and_exact(encoder: TextEncoder) -> None:
    broken = [
        i for i, piece in enumerate(encoder.pieces(range(encoder.tokenizer.get_vocab_size()))) if piece == b"\xff"
    ]
    ids = (broken or [5]) * 3000
    assert stream(encoder, ids, random.Random(1)) == encoder.tokenizer.decode(ids)


def test_state_goes_on_behind_a_prefix(encoder: TextEncoder) -> None:
    ids = encoder.tokenizer.encode("hello world 😀 naïve café").ids
    for cut in range(len(ids)):
        whole, resumed = OutputText(encoder), OutputText(encoder)
        resumed.push(ids[:cut])
        whole.push(ids[:cut])
        assert whole.push(ids[cut:]).text + whole.finish() == resumed.push(ids[cut:]).text + resumed.finish()


def test_a_stop_string_over_token_boundaries_ends_the_output(encoder: TextEncoder) -> None:
    text = "hello world, the quick brown fox"
    ids = encoder.tokenizer.encode(text, add_special_tokens=False).ids
    output = OutputText(encoder, ["ld, the q", "never"])
    delta = output.push(ids)
    assert output.stopped == "ld, the q"
    assert encoder.tokenizer.decode(ids).startswith(delta.text)
    assert delta.text.endswith("wor")
    assert "ld, the q" in encoder.tokenizer.decode(ids[: delta.num_consumed])
    assert "ld, the q" not in encoder.tokenizer.decode(ids[: delta.num_consumed - 1])


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first position where a stop string ends, and the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def test_stop_matcher_equals_the_naive_search() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        text = "".join(rng.choice("abé😀") for _ in range(rng.randrange(0, 30)))
        stops = ["".join(rng.choice("abé😀") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        include = rng.random() < 0.5
        matcher, out, at, found = StopMatcher(stops, include), "", 0, None
        while at < len(text) and found is None:
            num = rng.randrange(1, 6)
            emitted, found = matcher.feed(text[at : at + num])
            out += emitted
            at += num
            whole = naive(text, stops, include)[0]
            assert whole.startswith(out), "part of a stop string was shown"
        if found is None:
            out += matcher.flush()
        assert (out, found) == naive(text, stops, include)
