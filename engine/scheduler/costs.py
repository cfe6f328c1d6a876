"""The cost of a preemption: moving a sequence's blocks to host memory and back, or computing its tokens again.

Pure arithmetic on rates that were measured at start.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Measured rates of transfers and prefill.

    Attributes:
        block_bytes: bytes of one cache block, all layers.
        bytes_per_s: bytes per second between device and host memory.
        tokens_per_s: tokens computed per second in a prefill.
    """

    block_bytes: int
    bytes_per_s: float
    tokens_per_s: float

    def is_swap_cheaper(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving `num_blocks` out and back takes less time than computing `num_tokens`."""
        return self.tokens_lost(num_blocks, num_tokens) < num_tokens

    def tokens_lost(self, num_blocks: int, num_tokens: int) -> float:
        """Returns the tokens that could be computed in the time of the cheaper way."""
        return min(num_tokens, 2 * num_blocks * self.block_bytes / self.bytes_per_s * self.tokens_per_s)
