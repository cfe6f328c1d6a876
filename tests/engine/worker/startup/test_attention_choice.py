"""`--attention-backend`: what is refused by name, what is measured, and what the operator is told."""

import dataclasses
import types
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.request import Limits
from sluice_server.engine.worker.startup import attention
from sluice_server.engine.worker.startup.attention import ALONE, check_attention, choose_attention
from sluice_server.engine.worker.startup.formats import Formats
from sluice_server.kernels.backends.fa3 import FlashAttention3
from sluice_server.kernels.backends.flashinfer import FlashInfer
from sluice_server.kernels.backends.interface import AttentionBackend, NotInstalled, StepKind
from sluice_server.kernels.backends.measured import AttentionSizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = EngineConfig(device="cuda", max_num_seqs=8, max_num_batched_tokens=64)
FORMATS = Formats(torch.bfloat16, "", torch.bfloat16)
LIMITS = cast("Limits", types.SimpleNamespace(context_length=512))


def model(**traits: Any) -> Model:  # noqa: ANN401 # of traits' types
    """What the choice asks of a model."""
    given = ArchitectureTraits(**{"windows": (None,), **traits})
    sizes = types.SimpleNamespace(head_dim=128, num_heads=8, num_kv_heads=2)
    found = types.SimpleNamespace(traits=given, config=sizes, device=CUDA, dtype=torch.bfloat16, is_fixed=False)
    found.has_full_attention = None in given.windows
    return cast("Model", found)


class Prefill(FlashAttention3):
    """A second library, of prompts alone, whose launches are not recorded."""

    name = "flashinfer"
    supported = FlashInfer.supported


def loads(name: str, device: torch.device) -> AttentionBackend:
    def never(*_: object) -> Tensor:
        raise AssertionError("nothing is computed")

    return (FlashAttention3 if name == "fa3" else Prefill)(never, f"{name} 1.0")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LIBRARIES", {name: partial(loads, name) for name in ("fa3", "flashinfer")})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def shares_of(found: dict[tuple[str, StepKind], list[float] | str]) -> Callable[..., list[float] | str]:
    """Measurements by library and kind."""

    def shares(library: AttentionBackend, kind: StepKind, sizes: AttentionSizes, seconds: object) -> list[float] | str:
        assert (sizes.heads, sizes.kv_heads, sizes.max_keys, sizes.max_rows) == (8, 2, 512, 8)
        return found[library.name, kind]

    return shares


def choose(name: str, given: Model | None = None, **changes: Any) -> tuple[Any, tuple[str, ...]]:  # noqa: ANN401
    config = dataclasses.replace(CONFIG, attention_backend=name, **changes)
    return choose_attention(config, given or model(), FORMATS, LIMITS)


@pytest.mark.parametrize(
    ("device", "changes", "has_plugin", "said"),
    [
        (CPU, {}, False, "--attention-backend: fa3 needs --device cuda; on a CPU leave it out"),
        (CUDA, {"batch_invariant": True}, False, "fa3 keeps nothing of batch-invariance: with --batch-invariant take"),
        (CUDA, {}, True, "fa3 and an attention of --plugins: leave one of the two out"),
    ],
)
def test_a_library_is_refused_beside_other_settings(
    device: torch.device, changes: dict[str, Any], has_plugin: bool, said: str
) -> None:
    config = dataclasses.replace(CONFIG, attention_backend="fa3", **changes)
    with pytest.raises(ServiceError, match=said) as no:
        check_attention(config, device, has_plugin=has_plugin)
    assert no.value.field == "attention_backend"
    for name in ("triton", "auto"):
        check_attention(dataclasses.replace(config, attention_backend=name), device, has_plugin=has_plugin)


@pytest.mark.parametrize(
    ("name", "traits", "changes", "said"),
    [
        ("fa3", {"sinks": True}, {}, "--attention-backend: fa3: it does not support attention sinks; take triton or"),
        ("flashinfer", {}, {"max_draft_width": 2}, "flashinfer: it does not support drafts that branch"),
    ],
)
def test_what_a_library_lacks_for_the_model_is_named(
    name: str, traits: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ServiceError, match=said):
        choose(name, model(**traits), **changes)
    _, (note,) = choose("auto", model(sinks=True))
    assert note.startswith(ALONE) and "fa3: it does not support attention sinks" in note


def test_a_library_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(device: torch.device) -> AttentionBackend:
        raise NotInstalled("it needs a package")

    monkeypatch.setattr(attention, "LIBRARIES", {"fa3": missing})
    with pytest.raises(ServiceError, match="--attention-backend: fa3: it needs a package; take triton or auto"):
        choose("fa3")
    assert choose("auto") == (None, (f"{ALONE} (fa3: it needs a package)",))


def test_triton_needs_no_library() -> None:
    assert choose("triton") == (None, ())
    fixed = model()
    fixed.is_fixed = True
    assert choose("auto", fixed) == (None, (ALONE,))
    assert choose("auto", model(attention=lambda: None)) == (None, ())


def test_a_library_that_was_asked_for_computes_all_that_it_can() -> None:
    chosen, (note,) = choose("fa3")
    assert set(chosen.of_kind) == set(StepKind) and chosen.identity == "decode by fa3 1.0, prefill by fa3 1.0"
    assert note.endswith("(decode: fa3 1.0, prefill: fa3 1.0)")
    chosen, (note,) = choose("flashinfer")
    assert note.endswith("(prefill: flashinfer 1.0, decode: triton; steps with many prompt tokens are not recorded)")
    assert not chosen.records_prompts


@pytest.mark.parametrize(
    ("decode", "prefill", "other", "kinds"),
    [
        ([0.7, 0.8], [0.9, 0.9], [0.8, 0.8], {StepKind.DECODE: "fa3", StepKind.PREFILL: "flashinfer"}),
        ([0.99, 0.95], [0.6, 0.9], [0.8, 0.8], {StepKind.PREFILL: "fa3"}),
        ("it gives other numbers", [1.2, 1.0], "it fails", {}),
    ],
    ids=str,
)
def test_the_fastest_is_chosen_for_each_kind_of_step(
    decode: list[float] | str,
    prefill: list[float] | str,
    other: list[float] | str,
    kinds: dict[StepKind, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {("fa3", StepKind.DECODE): decode, ("fa3", StepKind.PREFILL): prefill}
    monkeypatch.setattr(attention, "shares", shares_of({**found, ("flashinfer", StepKind.PREFILL): other}))
    chosen, (note,) = choose("auto")
    assert ({} if chosen is None else {kind: one.name for kind, one in chosen.of_kind.items()}) == kinds
    assert (chosen is None) is (not kinds) and note.startswith(ALONE) is (not kinds)
    assert ("fa3: it gives other numbers" in note) is isinstance(decode, str)
    assert isinstance(decode, str) or "of triton's time to decode" in note
