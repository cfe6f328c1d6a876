"""Steps that are computed each time, in place of recorded ones that are replayed."""

from collections.abc import Callable

import pytest

from sluice_server.engine.worker.device import CudaDevice


def computes_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has engines that are built from now on compute what they would record: with the same padding and schedules, so
    that a right kernel gives the same bits."""

    def capture(self: CudaDevice, body: Callable[[], None]) -> Callable[[], None]:
        body()
        return body

    monkeypatch.setattr(CudaDevice, "capture", capture)
