"""The number formats of an engine: valid combinations, and refusals at start by flag, value and remedy."""

import dataclasses
import re
from typing import Any

import pytest
import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.worker.startup.formats import choose_formats, name_of
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats import private_operators as private
from sluice_server.kernels.formats import weight_formats as kinds

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def asked(settings: dict[str, str]) -> EngineConfig:
    config = EngineConfig()
    known: dict[str, Any] = dict(settings)
    return dataclasses.replace(config, **known)


@pytest.mark.parametrize(
    ("device", "settings", "text"),
    [
        (CPU, {"quantization": "int4", "dtype": "bfloat16"}, "--quantization: int4 .* leave out --dtype bfloat16"),
        (
            CUDA,
            {"dtype": "bfloat16", "kv_cache_dtype": "float32"},
            "--kv-cache-dtype: float32 .* bfloat16, int8 or fp8",
        ),
        (CPU, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype: fp8 needs --device cuda; on a CPU take auto, float32,"),
        (CPU, {"quantization": "fp8"}, "--quantization: fp8 needs --device cuda; on a CPU take none, int8 or int4"),
        (CPU, {"quantization": "w8a8"}, "--quantization: w8a8 needs .* take int8, which rounds activations too"),
    ],
)
def test_what_does_not_go_together_is_refused(device: torch.device, settings: dict[str, str], text: str) -> None:
    with pytest.raises(ServiceError, match=text) as refused:
        choose_formats(asked(settings), device)
    assert refused.value.field in settings


@pytest.mark.parametrize(
    ("settings", "dtype", "cache"),
    [
        ({"dtype": "float32"}, torch.float32, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, torch.bfloat16, torch.float32),
        ({"quantization": "int8", "dtype": "float32"}, torch.float32, torch.float32),
        ({"quantization": "int4", "kv_cache_dtype": "int8"}, torch.float32, torch.int8),
    ],
)
def test_formats_follow_the_settings(settings: dict[str, str], dtype: torch.dtype, cache: torch.dtype) -> None:
    formats = choose_formats(asked(settings), CPU)
    assert (formats.dtype, formats.cache) == (dtype, cache)
    assert formats.weights == settings.get("quantization", "")


@pytest.mark.parametrize(("able", "unrounded"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_cache_is_bfloat16_beside_rounded_weights_on_every_cpu(
    monkeypatch: pytest.MonkeyPatch, able: bool, unrounded: torch.dtype
) -> None:
    """Activations between rounded weights are float32 all the same."""
    monkeypatch.setattr("sluice_server.engine.worker.startup.formats.computes_bfloat16", lambda: able)
    formats = choose_formats(asked({"quantization": "int8"}), CPU)
    assert (formats.dtype, formats.cache) == (torch.float32, torch.bfloat16)
    assert choose_formats(asked({}), CPU).cache is unrounded


@pytest.mark.parametrize("weights", ["int8", "int4", "w8a8", "fp8"])
def test_on_a_gpu_activations_between_rounded_weights_keep_their_dtype(weights: str) -> None:
    formats = choose_formats(asked({"quantization": weights, "dtype": "bfloat16", "kv_cache_dtype": "int8"}), CUDA)
    assert (formats.dtype, formats.weights, formats.cache) == (torch.bfloat16, weights, torch.int8)


def test_a_cache_in_fp8_is_e4m3() -> None:
    formats = choose_formats(asked({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}), CUDA)
    assert (formats.cache, formats.fp8_setting) == (torch.float8_e4m3fn, "--kv-cache-dtype fp8")
    assert name_of(formats.cache) == "fp8" and name_of(formats.dtype) == "bfloat16"
    assert not choose_formats(asked({"dtype": "bfloat16", "kv_cache_dtype": "int8"}), CUDA).fp8_setting


def test_what_is_slower_than_it_could_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with our kernels but neither VNNI nor bfloat16, and on one without our kernels."""
    monkeypatch.setattr("sluice_server.engine.worker.startup.formats.computes_bfloat16", lambda: False)
    monkeypatch.setattr(builds, "is_available", lambda: True)
    machine(monkeypatch, "v4")

    def notes(**settings: str) -> str:
        return " ".join(choose_formats(asked(settings), CPU).notes)

    assert re.search("no AVX-512 VNNI.*int8", notes(quantization="int8"))
    assert "widened as they are read" in notes(dtype="bfloat16")
    assert re.search("no AVX-512 VNNI.*would take", notes(dtype="float32"))
    machine(monkeypatch, "v4_vnni", "v4", "v3")
    assert notes(quantization="int8") == notes(dtype="float32") == ""
    machine(monkeypatch, "v3")
    assert re.search("no AVX-512: the kernels for AVX2", notes(dtype="float32"))
    monkeypatch.setattr(builds, "is_available", lambda: False)
    assert "install a C++ compiler" in notes(dtype="float32")
    machine(monkeypatch)
    assert "no AVX2" in notes(dtype="float32")


def test_an_operating_system_without_tiles_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that refuse to load are left out for the next best, and the log says why."""
    machine(monkeypatch, "v4_amx", "v4_bf16")
    monkeypatch.setattr(builds, "instruction_set", lambda: "v4_bf16")
    monkeypatch.setattr(builds, "is_available", lambda: True)
    monkeypatch.setattr(builds, "why_not", lambda name: "the operating system does not let this process use AMX")
    notes = " ".join(choose_formats(asked({"dtype": "float32"}), CPU).notes)
    assert re.search(r"kernels for v4_amx .* \(the operating system does not let this process use AMX\)", notes)


def machine(monkeypatch: pytest.MonkeyPatch, *runnable: str) -> None:
    """Gives this machine these instruction sets, and kernels for the first of them."""
    monkeypatch.setattr(builds, "runnable", lambda: runnable)
    monkeypatch.setattr(builds, "instruction_set", lambda: next(iter(runnable), "none"))


HAS_PACKED = not private.fault(private.PACKED_LINEAR[torch.bfloat16])
needs_packed = pytest.mark.skipif(not HAS_PACKED, reason="this CPU's oneDNN has no packed linear of bfloat16")


@needs_packed
@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (AttributeError("gone"), r"is missing from torch .* \(AttributeError\)"),
        (TypeError("takes seven arguments"), r"is missing from torch .* \(TypeError\)"),
        (torch.zeros(5, 16, dtype=torch.bfloat16), "disagrees with its plain one by 1 of its size"),
        (torch.full((5, 16), float("nan")), "disagrees with its plain one by nan"),
    ],
)
def test_a_torch_without_the_private_operator_is_told_of(
    monkeypatch: pytest.MonkeyPatch, lost: torch.Tensor | Exception, text: str, has_own: bool
) -> None:
    """If the operator is missing, has other arguments or other results, the start reports it and its replacement."""

    def linear(*arguments: object) -> torch.Tensor:
        if isinstance(lost, torch.Tensor):
            return lost
        raise lost

    monkeypatch.setattr("sluice_server.engine.worker.startup.formats.computes_bfloat16", lambda: True)
    monkeypatch.setattr(builds, "is_available", lambda: has_own)
    monkeypatch.setattr(builds, "instruction_set", lambda: "v4_vnni" if has_own else "none")
    assert "packed bfloat16 linear" not in " ".join(choose_formats(asked({"dtype": "bfloat16"}), CPU).notes)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", linear)
    notes = " ".join(choose_formats(asked({"dtype": "bfloat16"}), CPU).notes)
    assert re.search(f"packed bfloat16 linear .*{text}", notes)
    assert ("sluice's own is used" if has_own else "its plain one is used") in notes
    monkeypatch.setattr(builds, "instruction_set", lambda: "v4_bf16")  # its kernels have such products
    assert "packed bfloat16 linear" not in " ".join(choose_formats(asked({"dtype": "bfloat16"}), CPU).notes)


@needs_packed
def test_a_private_operator_is_used_only_when_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """If oneDNN's packed linear is gone or gives other results, another kind is used."""
    weight, x = torch.randn(16, 32).bfloat16(), torch.randn(5, 32)
    want = x @ weight.float().t()
    monkeypatch.setattr(kinds, "computes_bfloat16", lambda: True)
    monkeypatch.setattr(builds, "instruction_set", lambda: "v4_vnni")  # its kernels have no products of bfloat16
    for lost in (RuntimeError("gone"), torch.zeros(5, 16, dtype=torch.bfloat16)):

        def linear(*arguments: object, lost: object = lost) -> torch.Tensor:
            if isinstance(lost, torch.Tensor):
                return lost
            raise RuntimeError("gone")

        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.mkldnn, "_linear_pointwise", linear)
            packed = kinds.pack(weight)
            assert packed.kernel != "oneDNN"
            assert torch.allclose(packed.apply(x).float(), want, atol=0.2)
    assert kinds.pack(weight).kernel == "oneDNN"
