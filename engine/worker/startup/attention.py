"""Chooses at start what computes attention on a GPU: our kernels, or a library that was asked for or measured faster.

Takes settings and a loaded model. Refusals name the option and what is missing.
"""

from collections.abc import Mapping

import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.model import Model
from sluice_server.engine.request import Limits
from sluice_server.engine.worker.startup.formats import Formats, unusable
from sluice_server.kernels.backends import fa3, flashinfer
from sluice_server.kernels.backends.chosen import ChosenAttention
from sluice_server.kernels.backends.interface import AttentionBackend, Load, NotInstalled, StepKind, Wanted
from sluice_server.kernels.backends.measured import (
    AttentionSizes,
    Seconds,
    is_faster,
    seconds_on_device,
    shares,
    typical,
)
from sluice_server.kernels.layout.ragged import AttentionOptions

LIBRARIES: Mapping[str, Load] = {"fa3": fa3.load, "flashinfer": flashinfer.load}
ALONE = "attention is computed by triton"


def check_attention(config: EngineConfig, device: torch.device, *, has_plugin: bool) -> None:
    """Raises ServiceError for a library that cannot be beside the other settings."""
    name = config.attention_backend
    if name not in LIBRARIES:
        return
    if device.type == "cpu":
        raise unusable("attention_backend", f"{name} needs --device cuda; on a CPU leave it out")
    if config.batch_invariant:
        text = f"{name} keeps nothing of batch-invariance: with --batch-invariant take triton"
        raise unusable("attention_backend", text)
    if has_plugin:
        raise unusable("attention_backend", f"{name} and an attention of --plugins: leave one of the two out")


def choose_attention(
    config: EngineConfig, model: Model, formats: Formats, limits: Limits, seconds: Seconds = seconds_on_device
) -> tuple[ChosenAttention | None, tuple[str, ...]]:
    """Returns what computes attention, None for our kernels alone, and notes for the operator.

    `seconds` measures a call. Raises ServiceError for a library that was asked for, and is not installed or does not
    support the model.
    """
    name = config.attention_backend
    if name == "triton" or model.device.type == "cpu" or model.traits.attention is not None:
        return None, ()
    wanted = wanted_of(config, model, formats)
    if name == "auto":
        return (None, (ALONE,)) if model.is_fixed else _fastest(wanted, sizes_of(config, model, limits), seconds)
    library = _loaded(name, wanted, model.device)
    if isinstance(library, str):
        raise unusable("attention_backend", f"{name}: {library}; take triton or auto")
    chosen = ChosenAttention(dict.fromkeys(library.supported.kinds, library))
    return chosen, (_described(chosen),)


def wanted_of(config: EngineConfig, model: Model, formats: Formats) -> Wanted:
    """Returns what the model and the settings ask of attention."""
    major, minor = torch.cuda.get_device_capability(model.device)
    traits = model.traits
    return Wanted(
        capability=10 * major + minor,
        dtype=formats.dtype,
        cache=formats.cache,
        head_dim=model.config.head_dim,
        has_windows=any(traits.windows),
        has_caps=traits.score_cap > 0,
        has_sinks=traits.sinks,
        has_trees=config.max_draft_width > 1,
    )


def sizes_of(config: EngineConfig, model: Model, limits: Limits) -> AttentionSizes:
    """Returns the sizes for which attention is measured: those of a layer without a window, if there is one."""
    traits, dim = model.traits, model.config.head_dim
    scale = dim**-0.5 if traits.score_scale is None else traits.score_scale
    window = None if model.has_full_attention else traits.windows[0]
    return AttentionSizes(
        heads=model.config.num_heads,
        kv_heads=model.config.num_kv_heads,
        dim=dim,
        block_size=config.block_size,
        dtype=model.dtype,
        device=model.device,
        options=AttentionOptions(scale, window, traits.score_cap),
        max_rows=config.max_num_seqs,
        max_tokens=config.max_num_batched_tokens,
        max_keys=limits.context_length,
    )


def _loaded(name: str, wanted: Wanted, device: torch.device) -> AttentionBackend | str:
    """Returns a library, or what is missing."""
    try:
        library = LIBRARIES[name](device)
    except NotInstalled as error:
        return str(error)
    lacking = library.supported.lacking(wanted)
    return f"it does not support {', '.join(lacking)}" if lacking else library


def _fastest(wanted: Wanted, sizes: AttentionSizes, seconds: Seconds) -> tuple[ChosenAttention | None, tuple[str, ...]]:
    """Returns the fastest of what is installed for each kind of step; our kernels where none is clearly faster."""
    best, said = dict[StepKind, tuple[float, AttentionBackend]](), list[str]()
    for name in LIBRARIES:
        library = _loaded(name, wanted, sizes.device)
        if isinstance(library, str):
            said.append(f"{name}: {library}")
            continue
        for kind in library.supported.kinds:
            found = shares(library, kind, sizes, seconds)
            share = found if isinstance(found, str) else f"{typical(found):.2f} of triton's time"
            said.append(f"{name}: {share} to {kind.value}")
            if not isinstance(found, str) and is_faster(found) and typical(found) < best.get(kind, (1.0,))[0]:
                best[kind] = typical(found), library
    chosen = ChosenAttention({kind: library for kind, (_, library) in best.items()}) if best else None
    return chosen, (f"{ALONE if chosen is None else _described(chosen)} ({'; '.join(said)})",)


def _described(chosen: ChosenAttention) -> str:
    """Returns a line for the operator."""
    names = (f"{kind.value}: {chosen.of_kind[kind].version or 'triton'}" for kind in chosen.of_kind)
    others = ", ".join((*names, *(f"{kind.value}: triton" for kind in StepKind if kind not in chosen.of_kind)))
    apart = "" if chosen.records_prompts else "; steps with many prompt tokens are not recorded"
    return f"attention is computed by libraries, and tokens may depend on the other rows of a step ({others}{apart})"
