"""Prompt embeddings: rows of hidden states that a request brings instead of the first tokens of its prompt.

Pure; `engine.checks` validates them.
"""

import array
import dataclasses
import enum
import hashlib
import math
import sys

PLACEHOLDER = 0  # the id that stands in a prompt for each row


class EmbedsType(enum.StrEnum):
    """The format of the numbers of prompt embeddings."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return 4 if self is EmbedsType.FLOAT32 else 2


@dataclasses.dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """The embeddings of the first `num_tokens` tokens of a prompt, whose ids are PLACEHOLDER.

    Attributes:
        values: the matrix [num_tokens, width], row by row, little-endian.
        dtype: the format of its numbers.
    """

    values: bytes
    dtype: EmbedsType
    num_tokens: int

    @property
    def digest(self) -> bytes:
        """SHA-256 over all that they are: equal digests mean equal embeddings."""
        head = f"{self.dtype.value} {self.num_tokens} {len(self.values)}\n".encode()
        return hashlib.sha256(head + self.values).digest()

    @property
    def is_finite(self) -> bool:
        """Whether every number is finite."""
        values = self.values
        if self.dtype is EmbedsType.BFLOAT16:  # the upper half of a float32
            wide = bytearray(2 * len(values))
            wide[2::4], wide[3::4] = values[0::2], values[1::2]
            values = bytes(wide)
        numbers = array.array("f", values)
        if sys.byteorder == "big":
            numbers.byteswap()
        return math.isfinite(sum(numbers))  # of float32 numbers, in float64: finite ones never overflow
