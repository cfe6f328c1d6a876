"""Credit of one generation of Converse: grants back what its reader has taken, half a window at a time. Pure."""

DEFAULT_WINDOW = 256


class Credit:
    """Tokens that the server may sample ahead of the reader. `window` 0 grants nothing by itself."""

    def __init__(self, window: int) -> None:
        self._step = -(-window // 2)
        self._taken = 0

    def take(self, num_tokens: int) -> int:
        """Note a delta of `num_tokens` sampled tokens that was read. Returns the grant to send now, 0 for none."""
        self._taken += num_tokens
        if not self._step or self._taken < self._step:
            return 0
        due, self._taken = self._taken, 0
        return due
