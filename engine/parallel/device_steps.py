"""The steps that a rank other than 0 computes on its GPU: recorded as rank 0's are, and begun when rank 0 says so."""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sluice_server.engine.kv_cache.table import BlockRun
from sluice_server.engine.parallel.messages import BeginStep
from sluice_server.engine.worker.device import Device
from sluice_server.engine.worker.graphs import GraphKey, RowShape
from sluice_server.engine.worker.recorded_steps import Recording
from sluice_server.engine.worker.step_numbers import StepNumbers


class DeviceSteps(Protocol):
    """A rank's device, as its orders need it."""

    def extend(self, runs: Sequence[BlockRun]) -> None:
        """Notes what has changed in block tables."""

    def begin(self, order: BeginStep) -> None:
        """Begins a step; returns before the device is done."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """See `Device.aside`."""

    def join(self) -> None:
        """See `Device.join`."""


class RecordedSteps:
    """Implements `DeviceSteps` on a GPU."""

    def __init__(self, device: Device, recording: Recording) -> None:
        self._device = device
        self._state, self._steps, self._graphs = recording

    def extend(self, runs: Sequence[BlockRun]) -> None:
        """Implements `DeviceSteps.extend`."""
        for run in runs:
            self._state.extend(run.slot, run.first, run.blocks)

    def begin(self, order: BeginStep) -> None:
        """Implements `DeviceSteps.begin`: with the shape, the numbers and the tokens of rank 0."""
        for run in order.tokens:
            self._state.note(*run)
        self._state.flush()
        given = np.frombuffer(order.given, dtype=np.int64).reshape(4, order.num_rows).copy()
        form = np.frombuffer(order.numbers, dtype=np.int64).copy()
        key = GraphKey(order.num_rows, order.per_row, RowShape[order.form])
        step = self._steps.forward(self._graphs, StepNumbers(key, given, form))
        if order.is_sampled:
            step.sample()

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Implements `DeviceSteps.aside`."""
        return self._device.aside()

    def join(self) -> None:
        """Implements `DeviceSteps.join`."""
        self._device.join()


class NoDeviceSteps:
    """Implements `DeviceSteps` on a CPU, where each step is computed from its plan."""

    def extend(self, runs: Sequence[BlockRun]) -> None:
        """Implements `DeviceSteps.extend`: block tables are on the host."""

    def begin(self, order: BeginStep) -> None:
        """Raises ValueError."""
        raise ValueError(f"{type(order).__name__} is no order for a rank that computes on a CPU")

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Implements `DeviceSteps.aside`: copies have ended when they return."""
        return contextlib.nullcontext()

    def join(self) -> None:
        """Implements `DeviceSteps.join`."""


ON_CPU = NoDeviceSteps()
