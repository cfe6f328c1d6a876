"""Finds the places of images among a prompt's token ids. Pure; pixels are not needed for it."""

from collections.abc import Sequence

from sluice_server.engine.errors import invalid
from sluice_server.engine.images import Grid, ImageForm, PromptImage


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
