"""Engines on a pretended device in a format of 16 bits, in which what float32 hides can be seen: what is promoted.

The interpreter computes wrongly in bfloat16, so that float16 stands in for it.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice_server.engine.engine import Engine
from sluice_server.engine.worker.startup import formats
from sluice_server.kernels import ops
from sluice_server.kernels.formats import weight_formats
from tests.gpu.test_gpu_engine import MARGIN
from tests.oracle.checkpoints import reference
from tests.pretended_gpu.cuda import pretend
from tests.pretended_gpu.test_pretended_engines import EXPERTS, LLAMA, NUM, PROMPTS, W8A16, build, checkpoint, run

HALF = torch.float16
QUICK = 1  # cases that every run has
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, W8A16": ("qwen3", W8A16),
    "llama": ("llama", {}),
    "qwen3, W4A16": ("qwen3", {"quantization": "int4"}),
    "llama, int8 cache": ("llama", {"kv_cache_dtype": "int8"}),
    "experts": ("qwen3_moe", {}),
    "gemma2": ("gemma2", {}),
}
FAR = {"qwen3, W4A16": 0.5}  # how far rounded weights may be off


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.dtype, torch.dtype]]:
    """What went into products and attention, and what came out of them."""
    seen = list[tuple[str, torch.dtype, torch.dtype]]()
    monkeypatch.setitem(formats.DTYPES, "bfloat16", HALF)
    monkeypatch.setattr(weight_formats, "KINDS", {**weight_formats.KINDS, "float16": weight_formats.KINDS["bfloat16"]})

    def watch(name: str) -> None:
        plain: Callable[..., Tensor] = getattr(ops, name)

        def watched(x: Tensor, *given: Any, **named: Any) -> Tensor:  # noqa: ANN401 # an operation's
            found = plain(x, *given, **named)
            seen.append((name, x.dtype, found.dtype))
            return found

        monkeypatch.setattr(ops, name, watched)

    for name in ("linear", "linear_normed", "linear_gated", "paged_attention"):
        watch(name)
    return seen


def far(directory: Path, found: dict[str, list[int]]) -> float:
    """How far the logit of a chosen token is below the greatest, as a share of the latter's size."""
    model, worst = reference(directory), 0.0
    for name, tokens in found.items():
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPTS[name], *tokens]])).logits[0, len(PROMPTS[name]) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float(((logits.amax(1) - chosen) / logits.abs().amax(1)).max()))
    return worst


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if i < QUICK else pytest.mark.long) for i, name in enumerate(CASES)]
)
def test_activations_stay_in_the_format_of_the_model(
    name: str, tmp_path: Path, products: list[tuple[str, torch.dtype, torch.dtype]]
) -> None:
    architecture, changes = CASES[name]
    options = EXPERTS if architecture == "qwen3_moe" else ()
    directory = checkpoint(tmp_path, dataclasses.replace(LLAMA, architecture=architecture, options=options))
    with pretend() as gpu:
        engine: Engine = build(directory, dtype="bfloat16", **changes)
        found = run(engine)
    assert gpu.replays and all(len(tokens) == NUM for tokens in found.values())
    assert far(directory, found) <= FAR.get(name, MARGIN)
    wrong = {one for one in products if (one[0] != "linear_normed" and one[1] is not HALF) or one[2] is not HALF}
    assert products and not wrong
