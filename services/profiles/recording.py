"""Records a profile of this process on request, and sends its file in parts: the operation `Profile`.

A profile ends by itself, by time or by an engine's steps, and when its caller leaves. Its file is made in a thread, so
that the loop goes on meanwhile. No path comes from a client: the file exists in memory only.
"""

import asyncio
import gzip
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Protocol

from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.services.messages.control import (
    CHUNK_BYTES,
    Chunk,
    Profile,
    ProfileKind,
    Progress,
    Recorded,
    Recording,
)
from sluice_server.services.profiles.python_memory import PythonMemory
from sluice_server.services.profiles.stacks import StackSampler
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """One profile. All methods but `encoded` run in the thread of the loop, between two steps of an engine."""

    def start(self) -> None:
        """Begins to record. Raises ServiceError if this process cannot."""

    def stop(self) -> None:
        """Ends; called again after an error, and also where `start` failed."""

    def encoded(self) -> bytes:
        """Returns the file, after `stop`; in another thread."""


class StepCount(Protocol):
    """The steps of an engine, as they end."""

    def watch(self, on_step: Callable[[], None] | None) -> None:
        """Calls `on_step` after each step from now on; None: none."""


Make = Callable[[str], Recorder]  # takes the profile's name
OF_ALL: Mapping[ProfileKind, Make] = {ProfileKind.STACKS: StackSampler, ProfileKind.PYTHON_MEMORY: PythonMemory}


class Profiler:
    """Takes the profiles of one process."""

    def __init__(
        self,
        process_id: str,
        metrics: Metrics,
        more: Mapping[ProfileKind, Make] | None = None,
        steps: StepCount | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`more`: kinds that only some processes have. `steps`: an engine's; None in other processes."""
        self._process_id = process_id
        self._metrics = metrics
        self._makers = {**OF_ALL, **(more or {})}
        self._steps = steps
        self._clock = clock
        self._num_steps = 0

    async def take(self, profile: Profile) -> AsyncGenerator[Progress, None]:
        """Yields that recording began, the parts of the file, and what was recorded. Raises ServiceError."""
        end = "failed"
        try:
            recorder = self._made(profile)
            logger.info("recording a profile (%s) for %g s at most", profile.kind, profile.seconds)
            began_s = self._clock()
            try:
                recorder.start()
                yield Recording()
                await self._elapse(profile)
            finally:
                recorder.stop()
            took_s, num_steps = self._clock() - began_s, self._num_steps
            data = await asyncio.to_thread(packed, recorder)
            if len(data) > profile.max_bytes:
                raise too_large(len(data), profile.max_bytes)
            for at in range(0, len(data), CHUNK_BYTES):
                yield Chunk(data[at : at + CHUNK_BYTES])
            yield Recorded(took_s, num_steps, len(data), hashlib.sha256(data).hexdigest())
            end = "finished"
        except (asyncio.CancelledError, GeneratorExit):
            end = "abandoned"
            raise
        finally:
            self._metrics.count(catalogue.PROFILES, profile.kind, end)

    def _made(self, profile: Profile) -> Recorder:
        make = self._makers.get(profile.kind)
        if make is None:
            raise invalid("kind", f"{self._process_id} takes no {profile.kind}, only {', '.join(sorted(self._makers))}")
        if profile.num_steps and self._steps is None:
            raise invalid("steps", f"{profile.num_steps}: {self._process_id} computes no steps; give a duration")
        return make(f"{self._process_id}: {profile.kind}")

    async def _elapse(self, profile: Profile) -> None:
        """Waits until the profile is to end."""
        self._num_steps = 0
        is_complete = asyncio.Event()

        def count() -> None:
            self._num_steps += 1
            if self._num_steps == profile.num_steps:
                is_complete.set()

        if self._steps is not None:
            self._steps.watch(count)
        try:
            async with asyncio.timeout(profile.seconds):
                await is_complete.wait()
        except TimeoutError:
            pass
        finally:
            if self._steps is not None:
                self._steps.watch(None)


def packed(recorder: Recorder) -> bytes:
    """Returns the recorder's file, compressed."""
    return gzip.compress(recorder.encoded(), compresslevel=6)


def too_large(size: int, limit: int) -> ServiceError:
    """Returns the error for a profile whose file is larger than its caller takes."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "PROFILE_TOO_LARGE",
        f"the profile has {size} bytes, and max_bytes allows {limit}: record for a shorter time, fewer steps, or allow "
        "more",
        field="max_bytes",
        details={"actual": str(size), "limit": str(limit)},
    )
