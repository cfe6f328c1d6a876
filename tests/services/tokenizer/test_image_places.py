"""Places of images among the ids of a prompt."""

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import ImageForm
from sluice_server.services.tokenizer.image_places import check_places, with_places

FORM = ImageForm(token_id=9, cell=1, most_tokens=6)


def test_each_id_of_an_image_becomes_as_many_as_its_tokens() -> None:
    ids, images = with_places([9, 1, 9, 9, 2], [(1, 3), (2, 1), (1, 2)], FORM)
    assert ids == [9, 9, 9, 1, 9, 9, 9, 9, 2]
    assert [(one.first, one.num_tokens, one.grid) for one in images] == [(0, 3, (1, 3)), (4, 2, (2, 1)), (6, 2, (1, 2))]


@pytest.mark.parametrize(("ids", "num"), [([1, 2], 1), ([9, 9], 1), ([9], 2)])
def test_another_number_of_places_is_refused(ids: list[int], num: int) -> None:
    with pytest.raises(ServiceError, match=f"has {ids.count(9)} places for {num} images"):
        check_places(ids, num, FORM, "chat")
