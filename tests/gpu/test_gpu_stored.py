"""Published quantised checkpoints on a GPU: an engine's tokens are likely ones of the weights that they represent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from tests.gpu.test_gpu_forms import SHAPE
from tests.oracle import published
from tests.oracle.checkpoints import reference
from tests.oracle.published import AWQ, GPTQ, compressed, publish

CONFIG = EngineConfig(device="cuda", dtype="bfloat16", block_size=32, max_num_seqs=4, kv_cache_tokens=4096)
Quantise = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
FORMS: dict[str, tuple[dict[str, Any], Quantise, float]] = {  # and the share of the largest logit that may be missed
    "awq": (AWQ, published.awq, 0.1),
    "gptq": (GPTQ, published.gptq, 0.1),
    "channel": (compressed("channel"), published.fp8, 0.3),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", FORMS)
def test_tokens_are_likely_ones(name: str, tmp_path: Path) -> None:
    config, quantise, missed = FORMS[name]
    found = publish(tmp_path, config, quantise, SHAPE)
    model = read_config(found.directory)
    built = build_engine(CONFIG, model, found.directory, limits_of(CONFIG, model, 1 << 20))
    assert built.computing.quantization == ("fp8" if name == "channel" else name)
    prompt, tokens = tuple(range(1, 40)), list[int]()
    built.engine.add(EngineRequest("a", prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)))
    while built.engine.has_work:
        events = built.engine.step()
        assert not events.failed
        tokens += [token for event in events.sampled for token in event.token_ids]
    want: torch.nn.Module = reference(found.meant)
    want.cuda()
    whole = torch.tensor([[*prompt, *tokens]], device="cuda")
    logits = want(whole).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    assert ((logits.amax(1) - chosen) / logits.abs().amax(1)).max() <= missed
