"""What a preemption costs: moving a sequence's blocks to host memory and back, or computing its tokens again.

Pure arithmetic on rates that were measured at start. Knows no sequence and no block.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Attributes:
    block_bytes: of one cache block, all layers.
    bytes_per_s: between device and host memory.
    tokens_per_s: computed in a prefill.
    """

    block_bytes: int
    bytes_per_s: float
    tokens_per_s: float

    def is_swap_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether `num_blocks` go out and come back sooner than `num_tokens` are computed."""
        return 2 * num_blocks * self.block_bytes / self.bytes_per_s < num_tokens / self.tokens_per_s
