"""Encoding between steps: for how long, and what a failure leaves."""

import dataclasses

import pytest

from sluice_server.engine.executor.image_work import ALONE_S, ImageWork
from sluice_server.engine.images import PromptImage
from sluice_server.engine.scheduler.images import ImageBooks


@dataclasses.dataclass
class Rows:
    """Needs two calls for an image; the image of digest b"bad" fails."""

    asked: list[tuple[bytes, float]] = dataclasses.field(default_factory=list)
    dropped: list[bytes] = dataclasses.field(default_factory=list)

    def advance(self, image: PromptImage, seconds: float) -> bool:
        """Records the call."""
        self.asked.append((image.digest, seconds))
        if image.digest == b"bad":
            raise RuntimeError("no rows")
        return len([one for one, _ in self.asked if one == image.digest]) == 2

    def drop(self, digests: list[bytes]) -> None:
        """Records the digests."""
        self.dropped += digests


def test_encoding_takes_its_share_of_a_step_and_more_while_nothing_is_computed() -> None:
    books, rows = ImageBooks(1, 1), Rows()
    work = ImageWork(books, rows, 0.25)
    work.advance(1.0)
    assert not rows.asked
    for digest in (b"a", b"b"):
        books.begin([])
        assert books.await_rows([PromptImage(0, 1, (1, 1), digest, b"")])
        work.advance(0.4)
        work.advance(None)
        assert books.next is None
    assert rows.asked == [(b"a", 0.1), (b"a", ALONE_S), (b"b", 0.1), (b"b", ALONE_S)]
    assert rows.dropped == [b"a"]


def test_an_image_that_cannot_be_encoded_holds_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
    books, rows = ImageBooks(9, 1), Rows()
    books.begin([])
    assert books.await_rows([PromptImage(0, 1, (1, 1), b"bad", b"")])
    ImageWork(books, rows, 0.25).advance(1.0)
    assert books.next is None and "cannot be encoded" in caplog.text
