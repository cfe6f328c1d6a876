"""Attention of prompts by FlashInfer.

It plans a step on the host, from lengths and block tables there, which a recorded step does not have: it computes the
prompts of steps that are not recorded. A plan is made once a step, for all layers with the same window.
"""

import importlib
import importlib.metadata
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sluice_server.kernels.backends.interface import NotInstalled, StepKind, Supported
from sluice_server.kernels.layout.metadata import AttentionMetadata
from sluice_server.kernels.layout.ragged import AttentionOptions

PACKAGE = "flashinfer"
WORKSPACE_BYTES = 128 << 20  # for partial results, as its documentation advises


class FlashInfer:
    """Implements `AttentionBackend`."""

    name = "flashinfer"
    supported = Supported(
        kinds=(StepKind.PREFILL,),
        majors=(8, 9, 10, 12),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 128, 256),
        windows=True,
        caps=True,
        sinks=False,
        is_recorded=False,
        invariance="none: how it divides a row's keys depends on the other rows",
    )

    def __init__(self, module: Any, device: torch.device, version: str = "") -> None:  # noqa: ANN401 # untyped library
        self.version = version
        self._module = module
        self._space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[int | None, float], Any] = {}  # each has a plan
        self._copied: torch.cuda.Event | None = None  # behind what the last plan copies to the device

    def attend(
        self, q: Tensor, cache: Tensor, meta: AttentionMetadata, options: AttentionOptions, scales: Tensor | None
    ) -> Tensor:
        """Implements `AttentionBackend.attend`."""
        assert scales is None and options.sinks is None and len(meta.counts), "rows that only the device knows"
        plans, key = meta.ragged.plans, (self.name, options.window, options.cap)
        if key not in plans:
            plans[key] = self._planned(q, cache, meta, options)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num = meta.num_tokens
        plans[key].run(q[:num], cache.unbind(2), out=out[:num])
        return out.view(len(q), -1)

    def _planned(self, q: Tensor, cache: Tensor, meta: AttentionMetadata, options: AttentionOptions) -> Any:  # noqa: ANN401
        """Returns a wrapper that has planned a step."""
        if self._copied is not None:
            self._copied.synchronize()  # a plan overwrites the host's memory of the one before it
        key = options.window, options.cap
        if key not in self._wrappers:
            self._wrappers[key] = self._module.BatchPrefillWithPagedKVCacheWrapper(self._space, "NHD")
        wrapper, block = self._wrappers[key], cache.shape[1]
        nums = -(-meta.contexts // block)
        owned = np.concatenate([row[:num] for row, num in zip(meta.tables, nums, strict=True)])
        wrapper.plan(
            _ends(meta.counts),
            _ends(nums),
            torch.from_numpy(owned.astype(np.int32)),
            torch.from_numpy((meta.contexts - (nums - 1) * block).astype(np.int32)),
            *(q.shape[1], cache.shape[3], q.shape[2], block),
            causal=True,
            sm_scale=options.scale,
            window_left=-1 if options.window is None else options.window - 1,
            logits_soft_cap=options.cap,
            q_data_type=q.dtype,
            kv_data_type=cache.dtype,
        )
        self._copied = torch.cuda.Event()
        self._copied.record()
        return wrapper


def load(device: torch.device) -> FlashInfer:
    """Loads the library, which compiles its kernels at their first use. Raises NotInstalled."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise NotInstalled(f"it needs the package {PACKAGE}-python, which is not installed")
    try:
        module = importlib.import_module(PACKAGE)
        version = importlib.metadata.version(f"{PACKAGE}-python")
    except (ImportError, OSError, RuntimeError) as error:
        raise NotInstalled(f"{PACKAGE} cannot be imported: {error}") from error
    return FlashInfer(module, device, f"{PACKAGE} {version}")


def _ends(counts: "np.ndarray[Any, Any]") -> Tensor:
    """Returns int32 [rows + 1]: where each row begins, and the end."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
