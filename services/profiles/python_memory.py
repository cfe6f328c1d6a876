"""Records the Python objects that are allocated during a profile and still there at its end, by the stacks that made
them.

With the standard library's tracemalloc. It sees what Python's allocators hand out, not the memory of tensors. While it
records, Python code runs at about half its speed.
"""

import tracemalloc

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.profiles.speedscope import Frame, SampledProfile, document
from sluice_server.version import VERSION

MAX_DEPTH = 24  # innermost calls of an allocation
MAX_STACKS = 20_000  # the largest


class PythonMemory:
    """A recorder of allocations; see `profiles.recording.Recorder`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._snapshot: tracemalloc.Snapshot | None = None
        self._has_begun = False

    def start(self) -> None:
        """Begins. Raises ServiceError if something else of this process records allocations already."""
        if tracemalloc.is_tracing():
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "OPERATION_UNAVAILABLE",
                "Python's tracemalloc is in use in this process already, by PYTHONTRACEMALLOC for example: "
                "start the service without it",
            )
        tracemalloc.start(MAX_DEPTH)
        self._has_begun = True

    def stop(self) -> None:
        """Takes what is there, and ends; may be called again."""
        if self._has_begun:
            self._has_begun = False
            self._snapshot = tracemalloc.take_snapshot()
            tracemalloc.stop()

    def encoded(self) -> bytes:
        """Returns the document: stacks by bytes, the largest first."""
        assert self._snapshot is not None, "not recorded yet"
        found = self._snapshot.statistics("traceback")[:MAX_STACKS]
        stacks = [tuple(_frame(at) for at in one.traceback) for one in found]
        profile = SampledProfile("bytes still allocated", "bytes", stacks, [one.size for one in found])
        return document(self._name, [profile], f"sluice {VERSION}")


def _frame(at: tracemalloc.Frame) -> Frame:
    """Returns a line of code; tracemalloc knows no names of functions."""
    return Frame(f"{at.filename.rpartition('/')[2]}:{at.lineno}", at.filename, at.lineno)
