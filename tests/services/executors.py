"""An executor whose jobs a test runs one by one."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class OnDemand(Executor):
    """An executor that runs its jobs when the test says so, and their callbacks then."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401 # as Executor has it
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args, **kwargs))

        self.waiting.append(run)
        return future
