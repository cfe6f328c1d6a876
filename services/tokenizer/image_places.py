"""Finds the places of images among a prompt's token ids. Pure; pixels are not needed for it."""

from collections.abc import Sequence

from sluice_server.engine.errors import invalid
from sluice_server.engine.images import ImageForm, PromptImage


def with_places(ids: Sequence[int], num: int, form: ImageForm, field: str) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Returns the ids with each id that stands for an image repeated as often as the image has tokens, and the places
    of the images, whose pixels are not known yet. Raises ServiceError unless there is one such id for each image."""
    places = [at for at, one in enumerate(ids) if one == form.token_id]
    if len(places) != num:
        text = f"has {len(places)} places for {num} images, as the chat template writes it"
        raise invalid(field, text, limit=num, actual=len(places))
    found: list[int] = []
    images = []
    behind = 0
    for at in places:
        found += ids[behind:at]
        images.append(PromptImage(len(found), form.num_tokens, b"", b""))
        found += [form.token_id] * form.num_tokens
        behind = at + 1
    return [*found, *ids[behind:]], tuple(images)
