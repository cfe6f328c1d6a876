"""Describes what an engine decided when it started, for logs and clients."""

from collections.abc import Sequence

import torch

from sluice_server.engine.executor.computing import Computing
from sluice_server.engine.models.model import Model
from sluice_server.engine.worker.host.allocator import allocator
from sluice_server.engine.worker.host.threads import ThreadTuner
from sluice_server.engine.worker.startup.formats import Formats, name_of
from sluice_server.kernels.cpu import builds


def computing_of(
    device: torch.device, formats: Formats, model: Model, tuner: ThreadTuner | None, notes: Sequence[str] = ()
) -> Computing:
    """Describes what was decided, for logs and clients."""
    on_cpu = device.type == "cpu"
    return Computing(
        device=str(device),
        mode="eager" if on_cpu and not builds.is_available() else "native",
        kernels=model.kernel,
        instruction_set=builds.best_known() if on_cpu else "",
        dtype=name_of(formats.dtype),
        quantization=model.config.stored.method if model.config.stored is not None else formats.weights,
        cache_dtype=name_of(formats.cache),
        num_parameters=model.num_parameters,
        threads=0 if tuner is None else tuner.count,
        threads_because="" if tuner is None else tuner.why,
        allocator=allocator(),
        notes=(*formats.notes, *model.notes, *notes),
    )
