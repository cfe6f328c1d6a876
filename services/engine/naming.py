"""Names the contents of an engine's checkpoints while they are being loaded.

Reading and hashing run in a thread of their own beside the loading, which reads the same pages; the engine waits for
them before it keeps anything under the names.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from sluice_server.engine.worker.startup.identity import Digests
from sluice_server.services.checkpoint.model_source import CheckpointFiles, CheckpointName


class Naming:
    """Begins when it is entered; at its exit the thread has ended."""

    def __init__(self, model: CheckpointFiles, draft: CheckpointFiles | None) -> None:
        self._contents = [model, *([draft] if draft is not None else [])]
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="naming")
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
        """The directory of what drafts."""
        return self._contents[1].directory if len(self._contents) > 1 else None

    def digests(self) -> Digests:
        """Of both; waits. Raises ServiceError MODEL_CHANGED where files were replaced while they were read."""
        return Digests(*(one.result().digest for one in self._named))

    def check(self) -> str:
        """The model's revision, when both have been loaded. Raises ServiceError MODEL_CHANGED where what was loaded may
        not be what was named."""
        for contents in self._contents:
            contents.check()
        return self._named[0].result().revision
