"""The seconds of a step on a GPU, from published figures: nothing here is measured.

Sources: NVIDIA's data sheet of the H100 SXM (dense TFLOPS, bytes a second, memory), the configuration of Llama 3.1 8B,
and the table of TensorRT-LLM 1.0 for that model in fp8 on one H100 (`PUBLISHED`), to which the two shares of the peak
below are fitted: the model gives every row of it within 12 % (`tests/benchmarks/test_fleet_device.py`).
"""

import dataclasses
from collections.abc import Mapping

from sluice_server.engine.plan import StepPlan

HOST_S = 0.002  # of a step, for planning and launching it: assumed
SHARE_OF_FLOPS = 0.60  # of the peak, in products of many rows: fitted
SHARE_OF_BYTES = 0.85  # of the peak, for reading weights and cache: fitted
ATTENTION_FLOPS = 600e12  # of attention over a prompt: of FlashAttention-3, causal, heads of 128, in bf16

# (input, output): output tokens a second of Llama 3.1 8B in fp8 on one H100 SXM, requests without end
PUBLISHED: Mapping[tuple[int, int], float] = {
    (128, 128): 28_312,
    (128, 2048): 22_714,
    (500, 2000): 17_660,
    (1000, 1000): 15_220,
    (1000, 2000): 13_899,
    (2048, 128): 3_450,
    (2048, 2048): 9_305,
    (5000, 500): 3_459,
    (20000, 2000): 1_351,
}

# of several GPUs under tensor parallelism: of that table, Llama 3.1 70B, 2,048 in and 128 out, on H200
SPEED_UP: Mapping[int, float] = {1: 1.0, 2: 1.78, 4: 2.95, 8: 4.49}


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """A number format: operations a second at its peak, and bytes of a number."""

    flops: float
    num_bytes: int


BF16 = Format(989.4e12, 2)
FP8 = Format(1978.9e12, 1)
BYTES_PER_S = 3.35e12
MEMORY = 80e9 * 0.90  # what an engine takes of it

PARAMETERS = 8.03e9
LAYERS = 32
WIDTH = 4096
KV_NUMBERS = 2 * LAYERS * 1024  # of a token: keys and values of 8 heads of 128
DRAFT_PARAMETERS = 0.75e9  # of an EAGLE-3 head: a layer, and the vocabulary's rows


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of steps in a number format, of weights and cache, on one GPU or several."""

    format: Format
    num_gpus: int = 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token in the cache."""
        return KV_NUMBERS * self.format.num_bytes

    @property
    def cache_tokens(self) -> int:
        """Tokens that fit beside the weights."""
        return int((MEMORY * self.num_gpus - PARAMETERS * self.format.num_bytes) / self.kv_bytes)

    @property
    def token_s(self) -> float:
        """Seconds of one more token in a step, without attention."""
        return 2 * PARAMETERS / (SHARE_OF_FLOPS * self.format.flops * SPEED_UP[self.num_gpus])

    def __call__(self, plan: StepPlan) -> float:
        """Returns the seconds of a plan. Rows of one token wait for the cache, and not for attention."""
        pairs = num_read = 0.0
        for num, start in zip(plan.query_lens, plan.starts, strict=True):
            pairs += num * (start + num / 2) if num > 1 else 0.0
            num_read += start + num
        return self.seconds(plan.num_tokens, pairs, num_read)

    def seconds(self, num_tokens: float, pairs: float, num_read: float) -> float:
        """Returns the seconds of a step of `num_tokens`, which attend to `pairs` of tokens in all, and read `num_read`
        tokens of the cache."""
        speed_up = SPEED_UP[self.num_gpus]
        bytes_per_s = SHARE_OF_BYTES * BYTES_PER_S * speed_up
        weights_s = PARAMETERS * self.format.num_bytes / bytes_per_s
        attention_s = 4 * LAYERS * WIDTH * pairs / (ATTENTION_FLOPS * speed_up)
        cache_s = num_read * self.kv_bytes / bytes_per_s
        return HOST_S + weights_s + num_tokens * self.token_s + attention_s + cache_s

    def draft_s(self, num_drafts: int) -> float:
        """Returns the seconds of drafting chains of that length, one pass of the head for each token."""
        return num_drafts * DRAFT_PARAMETERS * self.format.num_bytes / (SHARE_OF_BYTES * BYTES_PER_S)


def published_s(cost: StepCost, num_input: int, num_output: int) -> float:
    """Returns the seconds that one request of the table takes of a device that is full of such requests."""
    num_rows = min(2048.0, cost.cache_tokens / (num_input + num_output / 2))
    pairs = num_input**2 / 2
    num_read = num_output * (num_input + num_output / 2)
    fixed_s = cost.seconds(0, 0, 0) * num_output / num_rows
    return fixed_s + cost.seconds(num_input + num_output, pairs, num_read) - cost.seconds(0, 0, 0)
