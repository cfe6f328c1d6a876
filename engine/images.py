"""Images of a prompt: pixels whose rows, which a vision tower computes, take the place of tokens' embeddings.

Pure; `engine.checks` validates them.
"""

import dataclasses
import hashlib

DIGEST_BYTES = 32


@dataclasses.dataclass(frozen=True, slots=True)
class ImageForm:
    """The form of the images that a model takes.

    Attributes:
        token_id: the id that stands in a prompt for each token of an image.
        num_tokens: tokens of an image.
        num_bytes: of its pixels.
        max_images: of a request.
    """

    token_id: int
    num_tokens: int
    num_bytes: int
    max_images: int = 16


@dataclasses.dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt.

    Attributes:
        first: position of its first token.
        num_tokens: its tokens; their ids are `ImageForm.token_id`.
        digest: SHA-256 over its pixels: equal digests mean equal pixels.
        pixels: [3, side, side], float32, normalised as the model takes them.
    """

    first: int
    num_tokens: int
    digest: bytes
    pixels: bytes

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.first + self.num_tokens

    @classmethod
    def at(cls, first: int, num_tokens: int, pixels: bytes) -> "PromptImage":
        """Returns an image at a place in a prompt."""
        return cls(first, num_tokens, hashlib.sha256(pixels).digest(), pixels)
