"""The time that memory takes for what a decode step reads; answers one JSON line for each line of its input.

    python -m benchmarks.cpu.memory_worker SHAPE CACHE_DTYPE

A step reads the weights in float32, of an embedding one row for each sequence, and the keys and values of its contexts.
So many bytes are summed by torch's threads, in pieces that no cache holds. A kernel that fetches ahead reads a little
faster: this tells how near to memory's rate a step is, and is no strict bound.
"""

import json
import math
import sys
from functools import partial

import torch
from torch import Tensor

from benchmarks.cpu.own_worker import THREADS, timed
from benchmarks.cpu.shapes import SHAPES, Shape, tensors_of

FLOAT = 4  # bytes
PIECE = 1 << 26  # numbers
NUMBER_AND_SCALE = {
    "float32": (4, 0),
    "bfloat16": (2, 0),
    "int8": (1, FLOAT),
}  # bytes, of a row's numbers and its scale


def bytes_of(shape: Shape, cache_dtype: str, tokens: int) -> int:
    """Of a step of a shape behind `tokens` of cache in all; in int8 each key and each value has a scale."""
    tied = shape.tie_word_embeddings
    weights = sum(math.prod(size) for name, size in tensors_of(shape) if tied or "embed_tokens" not in name)
    rows = tokens * 2 * shape.num_hidden_layers * shape.num_key_value_heads
    number, scale = NUMBER_AND_SCALE[cache_dtype]
    return weights * FLOAT + rows * (shape.head_dim * number + scale)


def read(piece: Tensor, num: int) -> None:
    """Reads so many numbers, those of a piece again and again."""
    for left in range(num, 0, -len(piece)):
        piece[:left].sum()


def main() -> None:
    """Answer until the input ends."""
    shape, cache_dtype = sys.argv[1:]
    torch.set_num_threads(THREADS)
    piece = torch.ones(PIECE)
    print(json.dumps({"ready": True, "about": "sums of as many bytes as a step reads"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        rows = 1 if asked["what"] == "shared" else asked["rows"]
        num = bytes_of(SHAPES[shape], cache_dtype, asked["context"] * rows) // FLOAT
        print(json.dumps({"seconds": [timed(partial(read, piece, num)) for _ in range(asked["steps"])]}), flush=True)


if __name__ == "__main__":
    main()
