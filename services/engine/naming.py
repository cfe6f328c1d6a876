"""Computes the digests of an engine's checkpoints while they are loaded.

Reading and hashing run on a separate thread beside the loading, which reads the same pages. The engine waits for the
digests before it stores cache blocks under them.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from sluice_server.engine.worker.host.aside import lower_aside
from sluice_server.engine.worker.startup.identity import Digests
from sluice_server.services.checkpoint.model_source import CheckpointFiles, CheckpointName


class Naming:
    """Starts hashing on entry, as a context manager; its thread has ended on exit."""

    def __init__(self, model: CheckpointFiles, draft: CheckpointFiles | None) -> None:
        self._contents = [model, *([draft] if draft is not None else [])]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="naming", initializer=lower_aside)
        self._named: list[Future[CheckpointName]] = []

    def __enter__(self) -> "Naming":
        self._named = [self._executor.submit(one.named) for one in self._contents]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(cancel_futures=True)

    @property
    def draft(self) -> Path | None:
        """The directory of the draft model or head, or None."""
        return self._contents[1].directory if len(self._contents) > 1 else None

    def digests(self) -> Digests:
        """Waits for the digests of model and draft. Raises ServiceError MODEL_CHANGED if a file changed meanwhile."""
        return Digests(*(one.result().digest for one in self._named))

    def check(self) -> str:
        """Returns the model's revision, after both are loaded.

        Raises ServiceError MODEL_CHANGED if the loaded files may differ from the hashed ones.
        """
        for contents in self._contents:
            contents.check()
        return self._named[0].result().revision
