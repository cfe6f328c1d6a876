"""The engine on one GPU: an 8B-shaped decode step against the time its bytes take, host time a step, throughput.

    python -m benchmarks.gpu_engine

Random weights made on the device. Throughput: 256 requests of 100 to 1024 tokens in and out, Qwen3-0.6B's shape.
"""

import dataclasses
import random
import time
from importlib import metadata

import torch
from torch import Tensor

from benchmarks.gpu_clock import copy_bandwidth
from benchmarks.machine import median, write
from engine.cache.cache import KVCache
from engine.engine import Engine
from engine.models.config import GenerationDefaults, ModelConfig, RopeConfig
from engine.models.model import Model
from engine.request import EngineRequest, Limits, SamplingParams
from engine.runner.device import CudaDevice
from engine.runner.overlapped import overlap
from engine.runner.runner import Runner
from engine.runner.state import Slots
from engine.runner.store import BlockStore
from engine.scheduler.scheduler import Scheduler

BLOCK = 32
STEPS = 200


class RandomWeights:
    """Normal weights of any name, on the device."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor."""
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02

    def has(self, name: str) -> bool:
        """Everything is there."""
        return True


LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    norm_eps=1e-6,
    rope=RopeConfig(),
    windows=(None,) * 32,
    context_length=4096,
    tied_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_ids=(),
    dtype="bfloat16",
    defaults=GenerationDefaults(),
)
QWEN_06B = dataclasses.replace(
    LLAMA_8B,
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    intermediate_size=3072,
    windows=(None,) * 28,
    tied_embeddings=True,
)


def make_engine(config: ModelConfig, num: int, num_blocks: int) -> Engine:
    """An engine for `num` sequences."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = Model(config, RandomWeights(), torch.bfloat16, device, config.context_length)
    store = BlockStore(model.new_cache(num_blocks, BLOCK))
    plain = Runner(model, store, BLOCK, num, config.context_length)
    runner = overlap(plain, model, store.cache, CudaDevice(device), Slots(num, config.context_length, BLOCK))
    cache = KVCache(num_blocks, BLOCK, prefix_caching=True)
    limits = Limits(config.context_length, config.vocab_size)
    return Engine(Scheduler(cache, limits, (), num, 8192), runner)


def decode_step(config: ModelConfig, num: int, context: int, bandwidth: float) -> dict[str, object]:
    """Median step of `num` rows of `context` tokens, and how long its bytes take at the bandwidth of a copy."""
    engine = make_engine(config, num, num * (context + STEPS + BLOCK) // BLOCK + num)
    add(engine, [(context, STEPS + 8)] * num)
    while len(engine.step().sampled) < num:  # until all prompts are computed
        continue
    times = []
    for _ in range(STEPS // 2):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    weights = sum(2 * size for size in weight_sizes(config))
    read = weights + num * context * 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    return {"rows": num, "context": context, "ms": median(times) * 1e3, "of_copy": read / bandwidth / median(times)}


def weight_sizes(config: ModelConfig) -> list[int]:
    """Numbers of each matrix that a step reads; the embedding is only gathered."""
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    layer = hidden * (heads + 2 * kv) + heads * hidden + 3 * hidden * config.intermediate_size
    return [layer * config.num_layers, config.vocab_size * hidden]


def add(engine: Engine, sizes: list[tuple[int, int]]) -> None:
    """Requests of so many tokens in and out."""
    rng = random.Random(0)
    for i, (num_in, num_out) in enumerate(sizes):
        prompt = tuple(rng.randrange(10_000) for _ in range(num_in))
        engine.add(EngineRequest(f"{i}", prompt, SamplingParams(max_tokens=num_out, temperature=0.6, ignore_eos=True)))


def throughput() -> dict[str, object]:
    """256 requests at once."""
    rng = random.Random(1)
    sizes = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    engine = make_engine(QWEN_06B, 256, 256 * 2048 // BLOCK)
    add(engine, sizes)
    torch.cuda.synchronize()
    begun, num = time.perf_counter(), 0
    while engine.has_work:
        num += sum(len(event.token_ids) for event in engine.step().sampled)
    took = time.perf_counter() - begun
    return {"requests": 256, "seconds": took, "tokens": num, "tokens_per_s": num / took}


def main() -> None:
    """Measure, print and write."""
    bandwidth = copy_bandwidth()
    figures: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "copy_tb_s": bandwidth / 1e12}
    figures |= {one: metadata.version(one) for one in ("torch", "triton")}
    figures["8b"] = [decode_step(LLAMA_8B, num, 1024, bandwidth) for num in (1, 32)]
    figures["0.6b"] = [decode_step(QWEN_06B, num, 512, bandwidth) for num in (1, 256)]
    figures["throughput"] = throughput()
    write("gpu_engine", "python -m benchmarks.gpu_engine", figures)


if __name__ == "__main__":
    main()
