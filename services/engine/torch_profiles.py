"""Profiles that only an engine's process takes: torch's operators and kernels, and the allocator of a CUDA device.

Both are torch's own recorders. The first must begin and end in the thread that computes, which is the loop's. It is
that of torch.autograd: torch.profiler's imports torch's compiler when it begins, while all requests wait for seconds.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.autograd.profiler import profile

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.messages.control import ProfileKind
from sluice_server.services.profiles.recording import Recorder

MAX_CUDA_EVENTS = 100_000  # of the allocator's history: the latest


class TorchTrace:
    """A recorder of torch operators and of the calls of Python that lead to them, our C++ kernels among these."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._profile: profile | None = None
        self._is_on = False

    def start(self) -> None:
        """Begins to record this thread, and the GPU if there is one."""
        device = "cuda" if torch.cuda.is_available() else None
        self._profile = profile(use_device=device, with_stack=True, use_kineto=True)
        self._profile.__enter__()
        self._is_on = True

    def stop(self) -> None:
        """Ends; may be called again."""
        if self._is_on and self._profile is not None:
            self._is_on = False
            self._profile.__exit__(None, None, None)

    def encoded(self) -> bytes:
        """Returns the trace as Chrome's trace viewer and Perfetto read it."""
        assert self._profile is not None, "not recorded yet"
        with tempfile.TemporaryDirectory(prefix="sluice-profile-") as directory:  # torch writes to a path only
            path = Path(directory) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return path.read_bytes()


class CudaMemory:
    """A recorder of the CUDA allocator's history, as JSON: torch's own file is a pickle."""

    def __init__(self, name: str) -> None:
        self._is_on = False
        self._snapshot: object = None

    def start(self) -> None:
        """Begins. Raises ServiceError without a CUDA device."""
        if not torch.cuda.is_available():
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "OPERATION_UNAVAILABLE",
                "this engine computes on a CPU, which has no CUDA memory: take python-memory, or torch",
                field="kind",
            )
        torch.cuda.memory._record_memory_history(max_entries=MAX_CUDA_EVENTS, stacks="python")
        self._is_on = True

    def stop(self) -> None:
        """Takes the history, and ends; may be called again."""
        if self._is_on:
            self._is_on = False
            self._snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)

    def encoded(self) -> bytes:
        """Returns the history: segments, and the trace of each device."""
        return json.dumps(self._snapshot, separators=(",", ":"), default=str).encode()


MAKERS: Mapping[ProfileKind, Callable[[str], Recorder]] = {
    ProfileKind.TORCH: TorchTrace,
    ProfileKind.CUDA_MEMORY: CudaMemory,
}


class StageSteps:
    """The steps of an engine's stage."""

    def __init__(self, stage: EngineStage) -> None:
        self._stage = stage

    def watch(self, on_step: Callable[[], None] | None) -> None:
        """Calls `on_step` after each step from now on; None: none."""
        self._stage.on_step = on_step
