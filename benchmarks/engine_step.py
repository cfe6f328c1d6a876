"""Compares the engine's decode step with a bare torch forward pass of the same model, interleaved.

    python -m benchmarks.engine_step [--runs 5] [--steps 48] [--threads N]

6.5 M parameters: 6 layers, hidden 256, 4/2 heads of 64, vocabulary 8,192; 128-token prompts; random weights.
"""

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.bare_forward import BareModel
from benchmarks.machine import median, write
from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.models.by_layer import RopeConfig
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.spans import Dim, Shape, sizes_of
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.worker.runner import Runner
from sluice_server.kernels.cpu import builds

PROMPT = 128
BLOCK = 8
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8192,
    hidden_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=704,
    norm_eps=1e-5,
    rope=RopeConfig(),
    windows=(None,) * 6,
    context_length=512,
    tied_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_ids=(2,),
    dtype="float32",
    defaults=SamplingParams(),
)


class RandomWeights:
    """Seeded normal weights of any name."""

    def get(self, name: str, shape: Shape) -> torch.Tensor:
        """Returns a tensor."""
        torch.manual_seed(hash(name) % 1000)
        sizes = sizes_of(shape)
        return torch.ones(sizes) if len(sizes) == 1 else torch.randn(sizes) * 0.05

    def stored(self, name: str, rows: Dim, width: Dim) -> None:
        """Returns None: nothing is quantised."""

    def stored_experts(self, name: str, shape: tuple[Dim, Dim, Dim]) -> None:
        """None, as `stored`."""

    def has(self, name: str) -> bool:
        """Returns True: every tensor exists."""
        return True


def make_engine(num: int) -> Engine:
    """An engine with room for `num` sequences of the whole context."""
    model = Model(CONFIG, RandomWeights(), torch.float32, torch.device("cpu"), CONFIG.context_length)
    blocks = num * CONFIG.context_length // 32
    limits = Limits(CONFIG.context_length, CONFIG.vocab_size)
    scheduler = Scheduler(KVCache(blocks, 32, prefix_caching=True), limits, CONFIG.eos_ids, num, 512)
    return Engine(scheduler, Runner(model, BlockStore(model.new_cache(blocks, 32)), 32, num, CONFIG.context_length))


def fill(engine: Engine, num: int, steps: int, seed: int) -> None:
    """Add `num` greedy requests and compute their prompts."""
    ids = torch.randint(0, CONFIG.vocab_size, (num, PROMPT), generator=torch.Generator().manual_seed(seed)).tolist()
    params = SamplingParams(max_tokens=steps + 40, temperature=0.0, ignore_eos=True)
    for i in range(num):
        engine.add(EngineRequest(f"{seed:016x}{i:016x}", tuple(ids[i]), params))
    produced: set[str] = set()
    while len(produced) < num:
        produced.update(event.request_id for event in engine.step().sampled)


def measure(num: int, steps: int, seed: int) -> tuple[float, float]:
    """Median step in ms of (engine, bare), alternating after BLOCK steps, so that other load affects both."""
    engine = make_engine(num)
    fill(engine, num, steps, seed)
    bare = BareModel(CONFIG, RandomWeights(), num, CONFIG.context_length)
    ids = torch.zeros(num, dtype=torch.int64)
    ours, theirs = [], []
    for i in range(steps):
        if i % BLOCK == 0:
            ours += [timed(engine.step) for _ in range(BLOCK)][1:]  # the first brings the weights back into the cache
            bare.step(ids, PROMPT + i)
        start = time.perf_counter()
        ids = bare.step(ids, PROMPT + i)
        theirs.append((time.perf_counter() - start) * 1e3)
    return median(ours), median(theirs)


def timed(call: Callable[[], object]) -> float:
    """Milliseconds that a call takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Measure at 1, 8 and 32 sequences and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    builds.set_threads(torch.get_num_threads())
    rows: dict[str, object] = {}
    for num in (1, 8, 32):
        runs = [measure(num, options.steps, seed) for seed in range(options.runs)]
        ours, bare = median([run[0] for run in runs]), median([run[1] for run in runs])
        ratio = median([run[0] / run[1] for run in runs])
        rows[str(num)] = {"engine_ms": round(ours, 3), "bare_ms": round(bare, 3), "ratio": round(ratio, 3)}
        print(f"{num:3d} sequences: engine {ours:.2f} ms, bare {bare:.2f} ms, ratio {ratio:.2f}", flush=True)
    threads = torch.get_num_threads()
    command = f"python -m benchmarks.engine_step --runs {options.runs} --steps {options.steps} --threads {threads}"
    write("engine_step", command, {"threads": threads, "decode_step_by_sequences": rows})


if __name__ == "__main__":
    main()
