"""Ends the task that reads a stream with a `ServiceError`, even while it waits for its transport."""

import asyncio
import contextlib
from collections.abc import Iterator

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.contract.errors import bare


class Interruption:
    """The interruption of one reader. `error` is the error that it was interrupted with, or None."""

    def __init__(self) -> None:
        self.error: ServiceError | None = None
        self._task: asyncio.Task[object] | None = None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """A context manager around the reading task. Raises `error` instead of CancelledError when it was
        interrupted."""
        task = self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self.error is None or task is None or task.uncancel():
                raise
            raise bare(self.error) from None
        finally:
            self._task = None

    def interrupt(self, error: ServiceError) -> None:
        """Ends the reader with `error`; only the first call counts."""
        if self.error is None:
            self.error = error
            if self._task is not None:
                self._task.cancel()

    def check(self) -> None:
        """Raises `error`, if there is one."""
        if self.error is not None:
            raise bare(self.error)
