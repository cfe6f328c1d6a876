"""Fetches images by their URLs in child processes that can be killed. Thread-safe."""

from collections.abc import Collection

import msgspec

from sluice_server.engine.errors import invalid
from sluice_server.services.media.fetch_frames import FetchAnswer, FetchJob, FetchSetup, Unfetched
from sluice_server.services.media.processor import FILE_LIMITS
from sluice_server.services.tokenizer.child_pool import WALL_FACTOR, ChildPool, CpuTimeLimit, DiedError, OverdueError

MODULE = "sluice_server.services.media.fetch_child"
MEMORY_BYTES = 512 << 20  # of address space
SECONDS = 5.0  # for one image, redirects included


class FetchWorkers:
    """A pool of at most `num` processes that fetch images from some hosts."""

    def __init__(self, hosts: Collection[str], num: int, seconds: float = SECONDS) -> None:
        setup = FetchSetup(MEMORY_BYTES, frozenset(hosts), FILE_LIMITS.max_bytes, seconds)
        self._seconds = seconds
        patience = CpuTimeLimit(job_s=1.2 * seconds / WALL_FACTOR)  # a host that sends a byte now and then
        self._children: ChildPool[FetchAnswer] = ChildPool(MODULE, setup, _decode, num, patience)

    def fetch(self, url: str, field: str) -> bytes:
        """Returns the file behind a URL. Raises ServiceError naming `field`."""
        try:
            answer = self._children.ask(FetchJob(url))
        except OverdueError:
            raise invalid(field, f"was not fetched within {self._seconds:g} s", limit=self._seconds) from None
        except DiedError:
            raise invalid(field, "cannot be fetched: the process that fetched it has ended") from None
        if isinstance(answer, Unfetched):
            raise invalid(field, answer.message)
        return answer.data

    def close(self) -> None:
        """Ends the children. Nothing may be in work."""
        self._children.close()


def _decode(answer: bytes) -> FetchAnswer:
    decoded: FetchAnswer = msgspec.msgpack.decode(answer, type=FetchAnswer)
    return decoded
