"""Images of a prompt: pixels whose rows, which a vision tower computes, take the place of tokens' embeddings.

Pure; `engine.checks` validates them.
"""

import dataclasses
import hashlib
from typing import TypeAlias

DIGEST_BYTES = 32
PIXEL_BYTES = 12  # red, green and blue, float32
Grid: TypeAlias = tuple[int, int]  # rows and columns of an image's tokens


@dataclasses.dataclass(frozen=True, slots=True)
class ImageForm:
    """The form of the images that a model takes.

    Attributes:
        token_id: the id that stands in a prompt for each token of an image.
        cell: pixels of a side of what is one token.
        most_tokens: of an image.
        grid: of every image; None: each has its own.
        breaks: the ids that stand behind each row of a grid but the last, and behind that; None: none do. Rows of the
            tower take the place of their embeddings too.
        around: the ids before an image's tokens and behind them, of which a chat template writes the first where an
            image belongs; None: it writes `token_id` there.
        is_whole: the tokens of an image all see one another, so that they are computed in one step.
        patch: pixels of a side of a patch, where pixels come patch by patch and token by token; 0: colour by colour.
        num_more: tokens besides those of the grid, before them.
        max_images: of a request.
    """

    token_id: int
    cell: int
    most_tokens: int
    grid: Grid | None = None
    patch: int = 0
    breaks: tuple[int, int] | None = None
    around: tuple[int, int] | None = None
    is_whole: bool = False
    num_more: int = 0
    max_images: int = 16

    @property
    def most_bytes(self) -> int:
        """Bytes of the pixels of the largest image."""
        return self.num_bytes((1, self.most_tokens))

    def has(self, grid: Grid) -> bool:
        """Whether an image may have this grid."""
        rows, columns = grid
        if self.grid is not None:
            return grid == self.grid
        return rows >= 1 and columns >= 1 and self.num_tokens(grid) <= self.most_tokens

    def num_tokens(self, grid: Grid) -> int:
        """Returns the tokens of an image."""
        return grid[0] * (grid[1] + (self.breaks is not None)) + self.num_more

    def num_bytes(self, grid: Grid) -> int:
        """Returns the bytes of an image's pixels."""
        return grid[0] * grid[1] * self.cell**2 * PIXEL_BYTES

    def ids(self, grid: Grid) -> tuple[int, ...]:
        """Returns the ids that stand for an image in a prompt."""
        if self.breaks is None:
            return (self.token_id,) * self.num_tokens(grid)
        row = (self.token_id,) * grid[1]
        return ((*row, self.breaks[0]) * grid[0])[:-1] + self.breaks[1:]


@dataclasses.dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt.

    Attributes:
        first: position of its first token.
        num_tokens: its tokens; their ids are `ImageForm.ids`.
        grid: rows and columns of its tokens.
        digest: of its pixels and its grid: equal digests mean equal images.
        pixels: float32, normalised, in the order in which the model takes them.
    """

    first: int
    num_tokens: int
    grid: Grid
    digest: bytes
    pixels: bytes

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.first + self.num_tokens

    @classmethod
    def at(cls, first: int, num_tokens: int, grid: Grid, pixels: bytes) -> "PromptImage":
        """Returns an image at a place in a prompt."""
        return cls(first, num_tokens, grid, digest_of(grid, pixels), pixels)


def digest_of(grid: Grid, pixels: bytes) -> bytes:
    """Returns SHA-256 over the pixels and their shape, without which images of one colour could be confused."""
    return hashlib.sha256(f"{grid[0]} {grid[1]}\n".encode() + pixels).digest()
