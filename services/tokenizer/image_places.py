"""Finds the places of images in a prompt's text and among its token ids. Pure; pixels are not needed for it."""

import bisect
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.engine.images import Grid, ImageForm, PromptImage


class ImageWords(NamedTuple):
    """The words of a model whose images are between two of them: the one before, which chat templates write for an
    image, the one for the image itself, and the one behind."""

    before: str
    image: str
    behind: str


def words_of(form: ImageForm, word_of: Callable[[int], str | None]) -> ImageWords | None:
    """Returns the words of a form, by what finds the word of an id; None for a model whose templates write all that
    belongs to an image. Raises ServiceError MODEL_INVALID for an id without a word."""
    if form.around is None:
        return None
    ids = form.around[0], form.token_id, form.around[1]
    words = [word_of(one) for one in ids]
    missing = [one for one, word in zip(ids, words, strict=True) if word is None]
    if missing:
        text = f"tokenizer.json has no word for the id {missing[0]}, which config.json has for images"
        raise ServiceError(Code.FAILED_PRECONDITION, "MODEL_INVALID", text)
    return ImageWords(*filter(None, words))


def with_words(text: str, cuts: Sequence[int], words: ImageWords) -> tuple[str, tuple[int, ...]]:
    """Returns a rendered chat with all words of each image, which are paragraphs of their own, and its cuts.

    A word that a cut is in was typed, and stays as it is.
    """
    whole, ends = f"\n\n{''.join(words)}\n\n", list[int]()

    def written(match: re.Match[str]) -> str:
        if any(match.start() < cut < match.end() for cut in cuts):
            return match[0]
        ends.append(match.end())
        return whole

    found = re.sub(re.escape(words.before), written, text)
    grown = len(whole) - len(words.before)
    return found, tuple(cut + grown * bisect.bisect_right(ends, cut) for cut in cuts)


def check_places(ids: Sequence[int], num: int, form: ImageForm, field: str) -> None:
    """Raises ServiceError unless there is one id that stands for an image for each image."""
    actual = ids.count(form.token_id)
    if actual != num:
        text = f"has {actual} places for {num} images, as the chat template writes it"
        raise invalid(field, text, limit=num, actual=actual)


def with_places(
    ids: Sequence[int], grids: Sequence[Grid], form: ImageForm
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Returns the ids with each id that stands for an image replaced by those of the image's tokens, and the places of
    the images, without their pixels. There is one such id for each image."""
    places = [at for at, one in enumerate(ids) if one == form.token_id]
    found: list[int] = []
    images = []
    behind = 0
    for at, grid in zip(places, grids, strict=True):
        found += ids[behind:at]
        images.append(PromptImage(len(found), form.num_tokens(grid), grid, b"", b""))
        found += form.ids(grid)
        behind = at + 1
    return [*found, *ids[behind:]], tuple(images)
