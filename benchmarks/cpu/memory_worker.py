"""The time that memory takes for what a decode step reads, whoever computes; answers one JSON line for each it reads.

    python -m benchmarks.cpu.memory_worker SHAPE CACHE_DTYPE

A step reads the weights in float32, of an embedding one row for each sequence, and the keys and values of its contexts.
So many bytes are summed in one piece by torch's threads.
"""

import json
import math
import sys

import torch

from benchmarks.cpu.own_worker import THREADS, timed
from benchmarks.cpu.shapes import SHAPES, Shape, tensors_of

FLOAT = 4  # bytes
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


def main() -> None:
    """Answer until the input ends."""
    shape, cache_dtype = sys.argv[1:]
    torch.set_num_threads(THREADS)
    print(json.dumps({"ready": True, "about": "sums of as many bytes as a step reads"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        rows = 1 if asked["what"] == "shared" else asked["rows"]
        numbers = torch.ones(bytes_of(SHAPES[shape], cache_dtype, asked["context"] * rows) // FLOAT)
        print(json.dumps({"seconds": [timed(numbers.sum) for _ in range(asked["steps"])]}), flush=True)


if __name__ == "__main__":
    main()
