"""Images filled into prompts: ids, places, pixels, the report of the prompt's tokens, and what is refused."""

import gc
import weakref
from concurrent.futures import Future

import pytest

from sluice_server.engine.errors import invalid
from sluice_server.engine.images import ImageForm
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.media.preparing import PixelCache, PreparedPixels
from sluice_server.services.messages.details import Tokenized
from sluice_server.services.messages.messages import Envelope, Failed, Prompt, Result, Submit
from sluice_server.services.messages.work import (
    Generate,
    ImageFile,
    Scheduling,
    Stops,
    TokenPrompt,
    pack_ids,
    unpack_ids,
)
from sluice_server.services.tokenizer.answers import EncodedMessage
from sluice_server.services.tokenizer.awaiting import chained
from sluice_server.services.tokenizer.inline_executor import InlineExecutor
from sluice_server.services.tokenizer.prompt_images import PromptImages

FORM = ImageForm(token_id=9, cell=1, most_tokens=40)
LIMITS = Limits(context_length=20, vocab_size=30, images=FORM)


ENVELOPE = Envelope("a", "gateway", "tenant", "model", "revision")


class BySize:
    """Decodes a file to an image of one row, with as many columns as bytes; an empty one is bad."""

    def prepare(self, data: bytes, field: str, media_type: str = "") -> PreparedPixels:
        """Returns the file as its pixels."""
        if not data:
            raise invalid(field, "is bad")
        return PreparedPixels(data * 3, data, (1, len(data)))


def filled(files: list[bytes]) -> EncodedMessage:
    """What becomes of a prompt of three ids before the images, of which each has a place."""
    ids = [1, 2, 3, *[9] * len(files), 4]
    work = Generate(
        *(TokenPrompt(pack_ids(ids)), SamplingParams(max_tokens=2)),
        images=tuple(ImageFile("f", one) for one in files),
    )
    made = Prompt(ENVELOPE, pack_ids(ids), SamplingParams(max_tokens=2), Stops(), Scheduling(), 0.0)
    report = Result(ENVELOPE, Tokenized(pack_ids(ids), {9: b"i"}))
    first: Future[EncodedMessage] = Future()
    whole = PromptImages(PixelCache(BySize()), LIMITS, InlineExecutor()).follow(Submit(ENVELOPE, work), first)
    first.set_result(EncodedMessage(made, report))
    return whole.result(timeout=10)


def test_ids_places_and_pixels_are_those_of_the_sizes() -> None:
    made = filled([b"ab", b"c"])
    assert isinstance(made.answer, Prompt) and made.prompt_report is not None
    assert unpack_ids(made.answer.ids) == [1, 2, 3, 9, 9, 9, 4]
    assert [(one.first, one.num_tokens, one.grid, one.pixels) for one in made.answer.images] == [
        (3, 2, (1, 2), b"ab"),
        (5, 1, (1, 1), b"c"),
    ]
    assert made.answer.images[0].digest == b"ababab" and made.images_s is not None
    assert isinstance(made.prompt_report.value, Tokenized)
    assert made.prompt_report.value.ids == made.answer.ids and made.prompt_report.value.pieces == {9: b"i"}


@pytest.mark.parametrize(("files", "says"), [([b"a", b""], "f: is bad"), ([b"a" * 15], "20")])
def test_a_bad_image_or_one_too_many_tokens_fails_the_request(files: list[bytes], says: str) -> None:
    made = filled(files)
    assert isinstance(made.answer, Failed) and says in made.answer.message


def test_a_prompt_without_images_is_left_alone() -> None:
    first: Future[EncodedMessage] = Future()
    work = Generate(TokenPrompt(pack_ids([1])), SamplingParams())
    assert PromptImages(PixelCache(BySize()), LIMITS, InlineExecutor()).follow(Submit(ENVELOPE, work), first) is first


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_is_done_is_dropped_without_a_collection_of_garbage(is_cancelled: bool) -> None:
    """Pixels would stay with it."""
    gc.collect()
    gc.disable()
    try:
        work = Generate(TokenPrompt(pack_ids([9])), SamplingParams(max_tokens=2), images=(ImageFile("f", b"ab"),))
        images = PromptImages(PixelCache(BySize()), LIMITS, InlineExecutor())
        encoded: Future[EncodedMessage] = Future()
        first = chained(encoded, InlineExecutor(), lambda made: made, lambda made: made)
        whole = images.follow(Submit(ENVELOPE, work), first)
        made = EncodedMessage(Prompt(ENVELOPE, pack_ids([9]), SamplingParams(max_tokens=2), Stops(), Scheduling(), 0.0))
        if is_cancelled:
            assert whole.cancel() and encoded.cancelled()
        else:
            encoded.set_result(made)
            assert isinstance(whole.result(timeout=10).answer, Prompt)
        living = [weakref.ref(one) for one in (encoded, first, whole)]
        del encoded, first, whole
        assert [one() for one in living] == [None] * 3
    finally:
        gc.enable()
