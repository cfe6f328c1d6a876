"""The tensor types of GGUF: which numbers the format gives them, their block sizes, and which are supported.

Depends on the standard library only.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor type.

    Attributes:
        name: as llama.cpp names it.
        block: numbers that share a block.
        size: bytes of a block.
    """

    name: str
    block: int
    size: int

    @property
    def is_quantised(self) -> bool:
        """Whether several numbers share a block."""
        return self.block > 1


TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
REFUSED: Mapping[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}  # types that exist and cannot be read here
SUPPORTED = ", ".join(one.name for one in TYPES.values())


def named(number: int) -> str:
    """Returns the name of a type for an error message."""
    return REFUSED.get(number, f"number {number}")
