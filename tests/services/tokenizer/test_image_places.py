"""Places of images among the ids of a prompt."""

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import ImageForm
from sluice_server.services.tokenizer.image_places import with_places

FORM = ImageForm(token_id=9, num_tokens=3, num_bytes=12)


def test_each_id_of_an_image_becomes_as_many_as_its_tokens() -> None:
    ids, images = with_places([9, 1, 9, 9, 2], 3, FORM, "chat")
    assert ids == [9, 9, 9, 1, 9, 9, 9, 9, 9, 9, 2]
    assert [(one.first, one.num_tokens, one.pixels) for one in images] == [(0, 3, b""), (4, 3, b""), (7, 3, b"")]


@pytest.mark.parametrize(("ids", "num"), [([1, 2], 1), ([9, 9], 1), ([9], 2)])
def test_another_number_of_places_is_refused(ids: list[int], num: int) -> None:
    with pytest.raises(ServiceError, match=f"has {ids.count(9)} places for {num} images"):
        with_places(ids, num, FORM, "chat")
