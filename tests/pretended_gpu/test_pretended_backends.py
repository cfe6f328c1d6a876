"""Engines on a pretended device whose attention a library computes: tokens of transformers, in recorded steps too."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sluice_server.engine.worker.startup import allocation, attention
from sluice_server.kernels.backends import fa3
from sluice_server.kernels.backends.fa3 import FlashAttention3
from sluice_server.kernels.backends.flashinfer import FlashInfer
from sluice_server.kernels.backends.interface import AttentionBackend, StepKind
from sluice_server.kernels.backends.measured import AttentionSizes
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions
from tests.kernels.backends.libraries import FLASHINFER, flash_attn_with_kvcache
from tests.oracle.checkpoints import make_checkpoint
from tests.pretended_gpu.cuda import pretend
from tests.pretended_gpu.test_pretended_engines import LLAMA, NUM, build, run, wanted

HEADS = range(8, 257, 8)


class Flash(FlashAttention3):
    """It computes in float32, as the pretended device does."""

    supported = dataclasses.replace(FlashAttention3.supported, dtypes=(torch.float32,), head_dims=HEADS)
    num_calls = 0

    def attend(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, options: AttentionOptions, scales: Tensor | None
    ) -> Tensor:
        type(self).num_calls += 1
        return super().attend(q, cache, meta, options, scales)


class Infer(FlashInfer):
    """The same of the other library."""

    supported = dataclasses.replace(FlashInfer.supported, dtypes=(torch.float32,), head_dims=HEADS)
    num_calls = 0

    def attend(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, options: AttentionOptions, scales: Tensor | None
    ) -> Tensor:
        type(self).num_calls += 1
        return super().attend(q, cache, meta, options, scales)


def load(name: str, device: torch.device) -> AttentionBackend:
    """A library that stands in for the real one."""
    if name == "flashinfer":
        return Infer(FLASHINFER, device, "flashinfer 0")
    return Flash(partial(fa3.by_package, flash_attn_with_kvcache), "fa3 0")


def shares(library: AttentionBackend, kind: StepKind, sizes: AttentionSizes, seconds: object) -> list[float]:
    """Measurements by which each library computes one kind of step."""
    return [0.5 if (library.name == "fa3") is (kind is StepKind.DECODE) else 2.0]


@pytest.mark.parametrize(
    "name",
    [pytest.param("fa3"), *(pytest.param(one, marks=pytest.mark.long) for one in ("flashinfer", "auto"))],
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where prompts are by a library that is not recorded, steps of some tokens are computed instead of recorded."""
    libraries = {one: partial(load, one) for one in ("fa3", "flashinfer")}
    monkeypatch.setattr(attention, "LIBRARIES", libraries)
    monkeypatch.setattr(attention, "shares", shares)
    monkeypatch.setattr(allocation, "MOST_RECORDED", 8)
    monkeypatch.setattr("sluice_server.kernels.backends.interface.SHORT", 2)
    directory = make_checkpoint(tmp_path, LLAMA)
    before = Flash.num_calls, Infer.num_calls
    with pretend() as gpu:
        engine = build(directory, attention_backend=name)
        started = gpu.launches.copy()
        assert run(engine) == wanted(directory, NUM) and gpu.replays > 0
        own = [name for name in gpu.launches - started if name.startswith("attention")]
    assert (Flash.num_calls > before[0]) is (name != "flashinfer")
    assert (Infer.num_calls > before[1]) is (name != "fa3")
    assert name != "fa3" or not own
    assert engine.identity is not None and name[:3] in (engine.identity.plugin + " auto")
