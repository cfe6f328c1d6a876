"""Attention by FlashAttention 3, from its own package (`flash_attn_interface`) or from the copy that vLLM installs.

Its kernels read the paged cache where it is, by strides, and rows and lengths from the device, so that a step can be
recorded. How keys are divided among programs follows from all rows of a step, by its own rules.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice_server.kernels.backends.interface import NotInstalled, StepKind, Supported
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions, Ragged

PACKAGE, VLLM = "flash_attn_interface", "vllm"
OBJECT = "vllm_flash_attn/_vllm_fa3_C.abi3.so"  # in vLLM's folder; it registers operators with torch

Forward = Callable[[Tensor, Tensor, Tensor, Ragged, AttentionOptions], Tensor]  # q, keys, values → [T, heads, D]


class FlashAttention3:
    """Implements `AttentionBackend`."""

    name = "fa3"
    supported = Supported(
        kinds=(StepKind.DECODE, StepKind.PREFILL),
        majors=(9,),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=range(8, 257, 8),
        windows=True,
        caps=True,
        sinks=False,
        is_recorded=True,
        invariance="none: how it divides a row's keys depends on the other rows",
    )

    def __init__(self, forward: Forward, version: str) -> None:
        self.version = version
        self._forward = forward

    def attend(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, options: AttentionOptions, scales: Tensor | None
    ) -> Tensor:
        """Implements `AttentionBackend.attend`."""
        assert scales is None and options.sinks is None
        keys, values = cache.unbind(2)
        return self._forward(q, keys, values, meta.ragged, options).view(len(q), -1)


def load(device: torch.device) -> FlashAttention3:
    """Loads the library. Raises NotInstalled."""
    if importlib.util.find_spec(PACKAGE) is not None:
        try:
            function = importlib.import_module(PACKAGE).flash_attn_with_kvcache
        except (ImportError, OSError, AttributeError) as error:
            raise NotInstalled(f"{PACKAGE} cannot be imported: {error}") from error
        return FlashAttention3(functools.partial(by_package, function), f"flash_attn_3 {_version('flash_attn_3')}")
    path = _object()
    if path is None:
        raise NotInstalled(f"it needs the package {PACKAGE} (flash_attn_3), or vLLM's copy; neither is installed")
    try:
        torch.ops.load_library(str(path))
        operator = torch.ops._vllm_fa3_C.fwd
    except (OSError, AttributeError) as error:
        raise NotInstalled(f"{path} cannot be loaded: {error}") from error
    return FlashAttention3(functools.partial(by_vllm, operator), f"FlashAttention 3 of vLLM {_version(VLLM)}")


def by_package(
    function: Callable[..., Any], q: Tensor, keys: Tensor, values: Tensor, rows: Ragged, options: AttentionOptions
) -> Tensor:
    """Computes with the package's `flash_attn_with_kvcache`."""
    num = rows.num_rows
    found: Tensor = function(
        q,
        keys,
        values,
        cache_seqlens=rows.contexts[:num],
        page_table=rows.tables[:num],
        cu_seqlens_q=rows.starts[: num + 1],
        max_seqlen_q=rows.max_query,
        softmax_scale=options.scale,
        causal=True,
        window_size=window_of(options),
        softcap=options.cap,
    )
    return found


def by_vllm(
    operator: Callable[..., Any], q: Tensor, keys: Tensor, values: Tensor, rows: Ragged, options: AttentionOptions
) -> Tensor:
    """Computes with vLLM's operator, which gives all that its function does beside checks of the platform."""
    num, none = rows.num_rows, None
    found = operator(
        *(q, keys, values, none, none, none, none),  # new keys and values, other queries, memory for the result
        *(rows.starts[: num + 1], none, none, none, rows.contexts[:num]),
        *(rows.max_query, rows.max_context, rows.tables[:num]),
        *(none, none, none, none, none),  # other rows of the cache, padding before keys, a rotation
        *(none, none, none),  # scales of a quantised cache
        *(options.scale, True, *window_of(options), options.cap, True),
        *(none, 0, none, 0),  # a plan; splits, packed groups and free multiprocessors by its own rules
        *(none, 1, 0, none),  # sinks, parts of a context on other ranks
    )
    result: Tensor = found[0]
    return result


def window_of(options: AttentionOptions) -> tuple[int, int]:
    """Returns how many keys before and behind its own a query sees, -1 for all."""
    return (-1, -1) if options.window is None else (options.window - 1, 0)


def _object() -> Path | None:
    """Returns vLLM's object, found without an import of vLLM; None if it is not there."""
    spec = importlib.util.find_spec(VLLM)
    folders = () if spec is None else spec.submodule_search_locations or ()
    return next((path for folder in folders if (path := Path(folder, OBJECT)).is_file()), None)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
