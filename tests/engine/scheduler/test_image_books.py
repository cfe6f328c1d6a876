"""Which images are encoded and dropped: claims in the order of the queue, within a number of bytes."""

import random

from sluice_server.engine.images import PromptImage
from sluice_server.engine.scheduler.images import ImageBooks


def image(number: int, num_tokens: int = 1) -> PromptImage:
    return PromptImage(0, num_tokens, (1, num_tokens), number.to_bytes(32, "big"), b"")


def encode_all(books: ImageBooks) -> list[int]:
    """Encodes what is wanted; returns the numbers of what was dropped."""
    dropped = []
    while (one := books.next) is not None:
        dropped += books.encoded(one)
        books.check()
    return [int.from_bytes(one, "big") for one in dropped]


def test_a_request_waits_until_all_of_its_images_have_rows() -> None:
    books = ImageBooks(10, 1)
    a, b = image(1), image(2)
    for expected in (a, b):
        books.begin([])
        assert books.await_rows([a, b, a]) and books.next == expected
        books.encoded(expected)
    books.begin([])
    assert not books.await_rows([a, b]) and books.next is None
    assert not books.await_rows([])


def test_images_of_one_request_do_not_displace_each_other() -> None:
    books = ImageBooks(2, 1)
    first, second = [image(1), image(2)], [image(3), image(4)]
    books.begin([])
    assert books.await_rows(first) and books.await_rows(second)
    assert encode_all(books) == []
    books.begin([])
    assert not books.await_rows(first) and books.await_rows(second) and books.next is None  # until the first is read
    books.begin(first[1:])  # its first image has been read
    assert books.await_rows(second) and books.next is None
    books.begin([])
    assert books.await_rows(second) and sorted(encode_all(books)) == [1, 2]


def test_a_request_larger_than_all_is_served_alone() -> None:
    books = ImageBooks(2, 1)
    books.begin([])
    large = [image(n) for n in range(5)]
    assert books.await_rows(large) and books.await_rows([image(9)])
    assert encode_all(books) == []
    books.begin([])
    assert not books.await_rows(large)
    books.begin([])
    assert books.await_rows([image(9)])
    assert encode_all(books) == [0, 1, 2, 3]


def test_the_least_recently_claimed_rows_go_first() -> None:
    books = ImageBooks(3, 1)
    for number in (1, 2, 3):
        books.begin([])
        books.await_rows([image(number)])
        encode_all(books)
    books.begin([])
    assert not books.await_rows([image(1)])
    books.begin([])
    books.await_rows([image(4)])
    assert encode_all(books) == [2]


def test_bytes_stay_within_the_limit_whatever_is_asked() -> None:
    rng = random.Random(5)
    books, kept = ImageBooks(20, 2), set[bytes]()
    for _ in range(3000):
        running = [image(rng.randrange(30), 2) for _ in range(rng.randrange(3))]
        books.begin([one for one in running if one.digest in kept])
        ready = [one for one in ([image(rng.randrange(30), 2)] for _ in range(4)) if not books.await_rows(one)]
        assert all(one[0].digest in kept for one in ready)
        if (wanted := books.next) is not None:
            kept.add(wanted.digest)
            kept.difference_update(books.encoded(wanted))
        books.check()
        assert len(kept) * 4 <= 20
