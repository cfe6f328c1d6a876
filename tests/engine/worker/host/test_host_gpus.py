"""Whether a machine may have a GPU, as its files tell."""

from pathlib import Path

import pytest
import torch

from sluice_server.engine.worker.host import gpus
from sluice_server.engine.worker.host.gpus import is_torch_for_cpu, may_have_gpu


@pytest.mark.parametrize(("has_driver", "is_for_cpu"), [(False, False), (True, True), (True, False)])
def test_a_gpu_needs_a_driver_and_a_torch_that_knows_it(
    has_driver: bool, is_for_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidiactl"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(gpus, "DRIVERS", (tmp_path / "another", driver))
    monkeypatch.setattr(gpus, "is_torch_for_cpu", lambda: is_for_cpu)
    assert may_have_gpu() == (has_driver and not is_for_cpu)


def test_it_is_never_said_of_a_machine_with_a_gpu() -> None:
    assert may_have_gpu() or not torch.cuda.is_available()
    assert is_torch_for_cpu() == (torch.version.cuda is None and torch.version.hip is None)
