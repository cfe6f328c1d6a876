"""Credit of one generation of Converse: grants the tokens that were read again, half a window at a time. Pure."""

DEFAULT_WINDOW = 256


class Credit:
    """The tokens that the server may sample ahead of the reader. With `window` 0 it grants nothing."""

    def __init__(self, window: int) -> None:
        self._step = -(-window // 2)
        self._taken = 0

    def take(self, num_tokens: int) -> int:
        """Records that a delta of `num_tokens` sampled tokens was read. Returns the grant to send now, 0 for none."""
        self._taken += num_tokens
        if not self._step or self._taken < self._step:
            return 0
        due, self._taken = self._taken, 0
        return due
