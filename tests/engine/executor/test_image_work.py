"""Encoding between steps: for how long, and what a failure leaves."""

import dataclasses
import random

import pytest

from sluice_server.engine.config import DEFAULTS
from sluice_server.engine.executor.image_work import ALONE_S, LONG, ImageWork
from sluice_server.engine.images import PromptImage
from sluice_server.engine.scheduler.images import ImageBooks


@dataclasses.dataclass
class Rows:
    """Needs `num_parts` calls for an image, each of which takes `part_s`; the image of a digest b"bad…" fails."""

    num_parts: int = 2
    part_s: float = 0.0
    now_s: float = 0.0
    asked: list[tuple[bytes, float]] = dataclasses.field(default_factory=list)
    dropped: list[bytes] = dataclasses.field(default_factory=list)

    def advance(self, image: PromptImage, seconds: float) -> bool:
        """Records the call."""
        self.asked.append((image.digest, seconds))
        self.now_s += self.part_s
        if image.digest.startswith(b"bad"):
            raise RuntimeError("no rows")
        return len([one for one, _ in self.asked if one == image.digest]) == self.num_parts

    def drop(self, digests: list[bytes]) -> None:
        """Records the digests."""
        self.dropped += digests


class Parts(Rows):
    """Needs parts without end, of which a call has those for which there is time."""

    def advance(self, image: PromptImage, seconds: float) -> bool:
        """Computes them."""
        self.now_s += max(1, int(seconds / self.part_s)) * self.part_s
        return False


def waiting(*digests: bytes) -> ImageBooks:
    """Books of which images are wanted."""
    books = ImageBooks(1, 1)
    want(books, *digests)
    return books


def want(books: ImageBooks, *digests: bytes) -> None:
    """Has a request of the queue want images."""
    books.begin([])
    assert books.await_rows([PromptImage(0, 1, (1, 1), one, b"") for one in digests])


def test_encoding_takes_its_share_of_a_step_and_more_while_nothing_is_computed() -> None:
    books, rows = ImageBooks(1, 1), Rows()
    work = ImageWork(books, rows, 0.25, lambda: rows.now_s)
    work.advance(0.4)
    assert not rows.asked
    for digest in (b"a", b"b"):
        want(books, digest)
        work.advance(0.4)
        work.advance(None)
        assert books.next is None
        work.advance(0.4)
    assert rows.asked == [(b"a", 0.1), (b"a", ALONE_S), (b"b", 0.1), (b"b", ALONE_S)]
    assert rows.dropped == [b"a"]


def test_a_part_waits_until_its_time_is_earned() -> None:
    rows = Rows(num_parts=100, part_s=0.125)
    work = ImageWork(waiting(b"a"), rows, 0.25, lambda: rows.now_s)
    turns = []
    for _ in range(32):
        before = len(rows.asked)
        work.advance(0.25)  # which earns half of a part
        turns.append(len(rows.asked) - before)
    assert turns == [0, 1] * 16
    rows.part_s = 1.0  # longer than a step: it is computed all the same, by its share
    for _ in range(64):
        work.advance(0.25)
    assert len(rows.asked) == 16 + 4


def test_nothing_is_encoded_behind_a_step_that_is_longer_than_most() -> None:
    rows = Rows(num_parts=1000, part_s=0.001)
    work = ImageWork(waiting(b"a"), rows, 0.25, lambda: rows.now_s)
    for step_s in [0.01] * 20 + [0.03]:
        before = len(rows.asked)
        work.advance(step_s)
        assert len(rows.asked) == before + (step_s == 0.01)
    work.advance(0.01)
    assert rows.asked[-1][1] > 0.25 * 0.03, "what a long step earned is spent behind the next one"
    before = len(rows.asked)
    for _ in range(100):
        work.advance(0.03)
    assert len(rows.asked) > before + 50, "where all are long, none is"


def test_a_long_wait_earns_no_long_burst() -> None:
    rows = Rows(num_parts=1000)
    books = ImageBooks(1, 1)
    work = ImageWork(books, rows, 0.25, lambda: rows.now_s)
    for _ in range(100):
        work.advance(0.01)
    want(books, b"a")
    for _ in range(100):
        work.advance(0.01)
    assert max(seconds for _, seconds in rows.asked) == pytest.approx(0.01)


@pytest.mark.parametrize("share", [DEFAULTS.encoder_share, 0.25, 4.0])
def test_a_gap_is_bounded_by_the_mean_step_and_the_share_is_spent(share: float) -> None:
    rows, rng = Parts(part_s=0.001), random.Random(1)
    work = ImageWork(waiting(b"a"), rows, share, lambda: rows.now_s)
    steps = [rng.uniform(0.009, 0.011) * (1 if at % 20 else 6) for at in range(1, 1001)]
    gaps = []
    for step_s in steps:
        before = rows.now_s
        work.advance(step_s)
        gaps.append(step_s + (rows.now_s - before))
    mean = sum(steps) / len(steps)
    most = (LONG + max(1.0, share)) * 1.3 * mean  # the mean of the last steps is now and then more than that of all
    assert max(gap for gap, step_s in zip(gaps, steps, strict=True) if gap > step_s) < most
    assert 0.7 * share * sum(steps) < rows.now_s <= share * sum(steps)


def test_an_image_that_cannot_be_encoded_holds_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
    books, rows = ImageBooks(9, 1), Rows()
    books.begin([])
    assert books.await_rows([PromptImage(0, 1, (1, 1), b"bad", b"")])
    ImageWork(books, rows, 0.25).advance(1.0)
    assert books.next is None and "cannot be encoded" in caplog.text


def test_what_a_step_may_encode_of_images_that_failed_is_dropped_in_turn() -> None:
    books, rows = ImageBooks(2, 1), Rows()
    work = ImageWork(books, rows, 0.25)
    for digest in (b"bad 1", b"bad 2", b"bad 3", b"bad 4"):
        want(books, digest)
        work.advance(None)
        assert books.next is None
        books.check()
    assert rows.dropped == [b"bad 1", b"bad 2"]
