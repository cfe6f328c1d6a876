"""The generations that run, by the ids that their caller gave them."""

import contextlib
from collections.abc import Iterator


class RunningCalls:
    """Finds running generations by the caller's request id, which several of them may share."""

    def __init__(self) -> None:
        self._generations: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def entered(self, request_id: str, generation: str) -> Iterator[None]:
        """Keeps a generation findable during the block."""
        mine = self._generations.setdefault(request_id, [])
        mine.append(generation)
        try:
            yield
        finally:
            mine.remove(generation)
            if not mine:
                del self._generations[request_id]

    def of(self, request_id: str) -> tuple[str, ...]:
        """Returns the generations that run under an id."""
        return tuple(self._generations.get(request_id, ()))
