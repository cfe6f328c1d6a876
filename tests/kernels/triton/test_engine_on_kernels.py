"""A whole engine on the Triton kernels, interpreted: the same tokens as on the CPU's own, chunks, batches and all."""

from pathlib import Path

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.limits import limits_of
from engine.models.config import read_config
from engine.request import EngineRequest, SamplingParams
from kernels import gpu
from tests.oracle.checkpoints import Shape, make_checkpoint

CONFIG = EngineConfig(
    device="cpu", dtype="float32", block_size=8, kv_cache_tokens=256, threads=1, max_num_batched_tokens=24
)


def tokens(directory: Path) -> dict[str, list[int]]:
    """Greedy tokens of two prompts at once, of which one takes two chunks."""
    config = read_config(directory)
    engine = build_engine(CONFIG, config, directory, limits_of(CONFIG, config, 1 << 20)).engine
    for name, num in (("short", 3), ("long", 30)):
        prompt = tuple(range(1, num + 1))
        engine.add(EngineRequest(name, prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)))
    out: dict[str, list[int]] = {"short": [], "long": []}
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for one in events.sampled:
            out[one.request_id] += one.token_ids
    return out


SHAPES = [Shape("qwen3", head_dim=32, kv_heads=1), Shape("mistral", options=(("sliding_window", 10),))]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.architecture)
def test_the_same_tokens_as_on_the_cpu(shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_checkpoint(tmp_path, shape)
    want = tokens(directory)
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    assert tokens(directory) == want
