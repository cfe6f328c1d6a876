"""Libraries of attention: their results, what they support, the choice by measurement, and what is not installed."""

import dataclasses
import importlib
import importlib.util
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.kernels import gpu
from sluice_server.kernels.backends import fa3, flashinfer, interface, measured
from sluice_server.kernels.backends.chosen import ChosenAttention
from sluice_server.kernels.backends.fa3 import FlashAttention3
from sluice_server.kernels.backends.flashinfer import FlashInfer
from sluice_server.kernels.backends.interface import OURS, AttentionBackend, NotInstalled, StepKind, Wanted, kind_of
from sluice_server.kernels.backends.measured import AttentionSizes, is_faster, made, shares, steps
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged, SharedPrefixRows
from sluice_server.kernels.reference import definitions
from tests.kernels.backends.libraries import (
    FLASHINFER,
    PrefillWrapper,
    VllmOperator,
    flash_attn_with_kvcache,
)

CPU = torch.device("cpu")
SIZES = AttentionSizes(4, 2, 8, 4, torch.float32, CPU, AttentionOptions(0.3), 3, 20, 30)
WANTED = Wanted(90, torch.bfloat16, torch.bfloat16, 128)
STEPS = {
    "decode": ([1, 1, 1], [1, 4, 19]),
    "prompts": ([20, 17], [20, 17]),
    "chunks beside decodes": ([1, 1, 18, 3], [9, 5, 30, 8]),
}


class Event:
    """See `torch.cuda.Event`."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels are the definition, and there is no stream."""
    attend = types.SimpleNamespace(paged_attention=_ours)
    monkeypatch.setattr(gpu, "family", {"attention": attend}.__getitem__)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def _ours(q: Tensor, cache: Tensor, rows: Ragged, options: AttentionOptions, scales: Tensor | None = None) -> Tensor:
    out = torch.zeros(len(q), q.shape[1] * q.shape[2])
    out[: rows.num_tokens] = definitions.ragged_attention(q, cache, rows, options, scales).float()
    return out


def library(name: str) -> AttentionBackend:
    if name == "flashinfer":
        return FlashInfer(FLASHINFER, CPU, "flashinfer 0")
    forward: Callable[..., Tensor] = partial(fa3.by_package, flash_attn_with_kvcache)
    return FlashAttention3(forward if name == "fa3" else partial(fa3.by_vllm, VllmOperator()), "fa3 0")


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"cap": 2.0}, {"window": 40, "cap": 5.0}], ids=str)
@pytest.mark.parametrize("name", ["fa3", "vllm", "flashinfer"])
@pytest.mark.parametrize("step", STEPS)
def test_a_library_computes_what_our_kernels_do(step: str, name: str, options: dict[str, Any]) -> None:
    sizes = dataclasses.replace(SIZES, options=AttentionOptions(0.3, **options))
    q, cache, meta = made(*STEPS[step], sizes)
    got, want = (one.attend(q, cache, meta, sizes.options, None) for one in (library(name), OURS))
    assert got.shape == want.shape and torch.allclose(got, want, atol=1e-6)


def test_a_plan_is_made_once_a_step_for_all_layers_alike() -> None:
    backend, (q, cache, meta) = library("flashinfer"), made(*STEPS["prompts"], SIZES)
    before = PrefillWrapper.num_plans
    for options in (AttentionOptions(0.3), AttentionOptions(0.3, window=4)) * 2:
        backend.attend(q, cache, meta, options, None)
    assert PrefillWrapper.num_plans == before + 2
    q, cache, other = made(*STEPS["decode"], SIZES)
    backend.attend(q, cache, other, AttentionOptions(0.3), None)
    assert PrefillWrapper.num_plans == before + 3


class Watched:
    """A library that counts its calls."""

    name, version = "watched", "watched 1"

    def __init__(self, *, is_recorded: bool = True) -> None:
        self.supported = dataclasses.replace(FlashAttention3.supported, is_recorded=is_recorded)
        self.calls = 0

    def attend(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, options: AttentionOptions, scales: Tensor | None
    ) -> Tensor:
        self.calls += 1
        return OURS.attend(q, cache, meta, options, scales)


def call(chosen: ChosenAttention, meta: AttentionMetadata, q: Tensor, cache: Tensor) -> Tensor:
    return chosen(q, cache, meta, 0.3, None)


@pytest.mark.parametrize(
    ("step", "kind"),
    [("decode", StepKind.DECODE), ("prompts", StepKind.PREFILL), ("chunks beside decodes", StepKind.PREFILL)],
)
def test_each_kind_of_step_is_computed_by_what_was_chosen_for_it(step: str, kind: StepKind) -> None:
    q, cache, meta = made(*STEPS[step], SIZES)
    assert kind_of(meta.ragged) is kind
    for named in StepKind:
        watched = Watched()
        found = call(ChosenAttention({named: watched}), meta, q, cache)
        assert watched.calls == (named is kind) and torch.equal(found, call(ChosenAttention({}), meta, q, cache))


def test_our_kernels_compute_what_a_library_cannot() -> None:
    """Trees, shared prefixes and tokens that see later ones, and recorded steps where a library cannot be recorded."""
    q, cache, meta = made(*STEPS["decode"], SIZES)
    zeros = torch.zeros(3, dtype=torch.int32)
    shared = SharedPrefixRows(torch.zeros(2, dtype=torch.int32), zeros[:1], meta.ragged.tables[:1], zeros, 1, 1)
    changes: list[dict[str, Any]] = [{"tree": torch.ones(3, dtype=torch.int64)}, {"shared": shared}]
    for one in (*changes, {"ends": meta.ragged.contexts}):
        watched = Watched()
        rows = dataclasses.replace(meta.ragged, **one)
        call(ChosenAttention({StepKind.DECODE: watched}), dataclasses.replace(meta, on_device=rows), q, cache)
        assert watched.calls == 0
    for is_recorded in (True, False):
        watched = Watched(is_recorded=is_recorded)
        chosen = ChosenAttention({StepKind.DECODE: watched})
        call(chosen, meta, q, cache)
        call(chosen, dataclasses.replace(meta, on_device=meta.ragged), q, cache)
        assert watched.calls == 1 + is_recorded


def test_what_was_chosen_is_named_and_says_what_can_be_recorded() -> None:
    chosen = ChosenAttention({StepKind.PREFILL: library("flashinfer"), StepKind.DECODE: OURS})
    assert chosen.identity == "prefill by flashinfer 0" and not chosen.records_prompts
    assert ChosenAttention({StepKind.DECODE: library("fa3")}).records_prompts and ChosenAttention({}).identity == ""


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("fa3", {"capability": 80}, "GPUs of compute capability 8.0"),
        ("fa3", {"dtype": torch.float32, "cache": torch.float32}, "activations in float32"),
        ("flashinfer", {"cache": torch.int8}, "a cache in int8 beside activations in bfloat16"),
        ("fa3", {"cache": torch.float8_e4m3fn}, "a cache in float8_e4m3fn beside activations in bfloat16"),
        ("fa3", {"head_dim": 257}, "heads of 257"),
        ("flashinfer", {"head_dim": 80}, "heads of 80"),
        ("fa3", {"has_sinks": True}, "attention sinks"),
        ("flashinfer", {"has_trees": True}, "drafts that branch"),
    ],
)
def test_what_a_library_lacks_is_named(name: str, changes: dict[str, Any], said: str) -> None:
    supported = library(name).supported
    assert supported.lacking(WANTED) == [] == supported.lacking(dataclasses.replace(WANTED, has_windows=True))
    assert supported.lacking(dataclasses.replace(WANTED, **changes)) == [said]
    without = dataclasses.replace(supported, windows=False, caps=False)
    both = dataclasses.replace(WANTED, has_windows=True, has_caps=True)
    assert without.lacking(both) == ["sliding windows", "capped scores"]


def took(times: dict[str, float]) -> measured.Seconds:
    """Measures a call by the class of what it calls."""
    return lambda call, is_recorded: times[type(call.func.__self__).__name__]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("theirs", "is_chosen"), [(0.94, True), (0.96, False), (1.0, False), (2.0, False)])
def test_a_library_is_taken_where_it_is_clearly_faster(theirs: float, is_chosen: bool) -> None:
    for kind in StepKind:
        found = shares(library("fa3"), kind, SIZES, took({"OurKernels": 1.0, "FlashAttention3": theirs}))
        assert found == [theirs] * len([*steps(kind, SIZES)]) and is_faster(found) is is_chosen
    assert is_faster([0.45, 1.1])  # FlashAttention 3 on an H200, of one prompt and of four short ones
    assert not is_faster([0.45, 1.2]) and not is_faster([0.92, 1.1]) and not is_faster("it fails")


def test_a_library_that_is_wrong_or_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = took({"OurKernels": 1.0, "FlashAttention3": 0.1})
    wrong = FlashAttention3(lambda q, *_: torch.zeros_like(q), "wrong")
    assert shares(wrong, StepKind.DECODE, SIZES, seconds) == "it gives other numbers"

    def fails(*_: object) -> Tensor:
        raise RuntimeError("no kernel image\nis available")

    assert shares(FlashAttention3(fails, ""), StepKind.PREFILL, SIZES, seconds) == "it fails: no kernel image"


def test_measured_steps_are_those_of_the_engine_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = dataclasses.replace(SIZES, max_rows=256, max_tokens=4096, max_keys=100_000, kv_heads=8, heads=8, dim=128)
    assert [*steps(StepKind.PREFILL, wide)] == [([2048], [2048]), ([512] * 4, [512] * 4)]
    assert [*steps(StepKind.DECODE, wide)] == [([1], [4096]), ([1] * 8, [4096] * 8)]
    assert [*steps(StepKind.DECODE, SIZES)] == [([1], [30]), ([1] * 3, [30] * 3)]
    assert [*steps(StepKind.PREFILL, SIZES)] == [([20], [20])]
    q, cache, meta = made([1, 2], [5, 30], SIZES)
    assert cache.shape == (16, 4, 2, 2, 8) and cache.stride()[0] == 2 * 2 * 2 * 4 * 8  # two layers share a block
    assert q.shape == (3, 4, 8) and not q.is_contiguous()
    assert len(np.unique(meta.tables)) == meta.tables.size


@pytest.mark.parametrize("load", [fa3.load, flashinfer.load])
def test_a_library_that_is_not_here_is_named(load: interface.Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match="needs the package flash"):
        load(CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(name=name))

    def broken(name: str) -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(NotInstalled, match="cannot be imported: undefined symbol"):
        load(CPU)


def test_the_copy_of_vllm_is_found_without_an_import_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / fa3.OBJECT
    path.parent.mkdir(parents=True)
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", {fa3.VLLM: spec}.get)
    with pytest.raises(NotInstalled, match="neither is installed"):
        fa3.load(CPU)
    path.touch()
    with pytest.raises(NotInstalled, match=f"{fa3.OBJECT} cannot be loaded"):
        fa3.load(CPU)
    loaded = list[str]()
    operators = types.SimpleNamespace(fwd=VllmOperator())
    ops = types.SimpleNamespace(load_library=loaded.append, _vllm_fa3_C=operators)
    monkeypatch.setattr(torch, "ops", ops)
    assert fa3.load(CPU).version == "FlashAttention 3 of vLLM of unknown version" and loaded == [str(path)]
