"""Places of images among the ids of a prompt."""

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import ImageForm
from sluice_server.services.tokenizer.image_places import (
    ImageWords,
    check_places,
    with_places,
    with_words,
    words_of,
)

FORM = ImageForm(token_id=9, cell=1, most_tokens=6)


def test_each_id_of_an_image_becomes_as_many_as_its_tokens() -> None:
    ids, images = with_places([9, 1, 9, 9, 2], [(1, 3), (2, 1), (1, 2)], FORM)
    assert ids == [9, 9, 9, 1, 9, 9, 9, 9, 2]
    assert [(one.first, one.num_tokens, one.grid) for one in images] == [(0, 3, (1, 3)), (4, 2, (2, 1)), (6, 2, (1, 2))]


@pytest.mark.parametrize(("ids", "num"), [([1, 2], 1), ([9, 9], 1), ([9], 2)])
def test_another_number_of_places_is_refused(ids: list[int], num: int) -> None:
    with pytest.raises(ServiceError, match=f"has {ids.count(9)} places for {num} images"):
        check_places(ids, num, FORM, "chat")


WORDS = ImageWords("<in>", "<i>", "</in>")
AROUND = ImageForm(token_id=9, cell=1, most_tokens=6, around=(7, 8))


@pytest.mark.parametrize(
    ("text", "cuts", "found", "moved"),
    [
        ("a<in>b", (), "a\n\n<in><i></in>\n\nb", ()),
        ("<in><in>", (), "\n\n<in><i></in>\n\n\n\n<in><i></in>\n\n", ()),
        ("a<in>b", (2,), "a<in>b", (2,)),  # typed
        ("<in>a<in>b<in>", (5, 6, 10), "\n\n<in><i></in>\n\na<in>b\n\n<in><i></in>\n\n", (17, 18, 22)),
        ("a<in>", (1, 5), "a\n\n<in><i></in>\n\n", (1, 17)),  # cuts beside it are not within it
    ],
)
def test_a_word_of_the_template_becomes_a_paragraph(
    text: str, cuts: tuple[int, ...], found: str, moved: tuple[int, ...]
) -> None:
    assert with_words(text, cuts, WORDS) == (found, moved)


def test_words_are_those_of_the_ids() -> None:
    assert words_of(FORM, str) is None
    assert words_of(AROUND, lambda one: f"<{one}>") == ImageWords("<7>", "<9>", "<8>")
    with pytest.raises(ServiceError, match="no word for the id 8"):
        words_of(AROUND, {7: "a", 9: "b"}.get)
