"""Measures encoders against their peers on one core, and what a flood of embeddings does to generations beside it.

    python -m benchmarks.encoders [--rounds 5] [--texts 16] [--steps 200] [--clock cpu] [--only flood]

Texts of 128 tokens through the engine, scheduler included, on random weights of two published shapes; the peers are
transformers and, where they are installed, onnxruntime with onnx and onnxscript (TEI's backend on CPUs), each at its
best batch size. All take turns, so that the machine's moods hit them alike; the best round counts, the median is kept.
The flood is of texts of 128 tokens, with the packaged demo model and eight streams, one thread: the time between two
tokens of a stream with the flood and without, by the tokens that a step may have, and by those of vectors beside
decodes (--max-num-pooling-tokens; 0 is no such limit). On a machine with other users, --clock cpu takes the time of the
processor for the time between two tokens.
"""

import argparse
import importlib.util
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.machine import median, version_of, write
from sluice_server.engine.build import build_engine
from sluice_server.engine.build_encoder import build_encoder
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams

DEMO = Path(__file__).parents[1] / "demo" / "target"
LENGTH = 128
BATCHES = (1, 4, 16)  # texts in a call of a peer
STREAMS = 8
LIMITS = ((512, 0), (128, 0), (32, 0), (512, 16), (512, 8), (512, 4))  # tokens of a step; of vectors beside decodes
OPEN = 16  # texts of the flood that wait or run at any time
SHAPES: dict[str, dict[str, int]] = {
    "MiniLM-L6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
Run = Callable[[], object]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


def texts_of(num: int, vocab_size: int) -> list[list[int]]:
    """Texts of random ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (num, LENGTH), generator=generator).tolist()


def own(directory: Path, dtype: str, texts: list[list[int]]) -> Run:
    """Computes all texts with an engine of this package."""
    config, model = EngineConfig(device="cpu", dtype=dtype, threads=1), read_served(directory)
    engine = build_encoder(config, model, directory, limits_of(config, model, 1 << 20)).engine
    names = itertools.count()

    def run() -> None:
        for ids in texts:
            engine.add(EngineRequest(f"{next(names):032x}", tuple(ids), SamplingParams(), pooling=Pooling.MEAN))
        num = 0
        while engine.has_work:
            num += len(engine.step().pooled)
        assert num == len(texts)

    return run


def in_batches(call: Callable[[torch.Tensor], object], texts: list[list[int]]) -> Iterator[tuple[int, Run]]:
    """Computes all texts by calls of each batch size."""
    for size in BATCHES:
        parts = torch.tensor(texts).split(size)
        yield size, lambda parts=parts: [call(part) for part in parts]  # type: ignore[misc] # bound now


def with_transformers(model: transformers.PreTrainedModel, dtype: torch.dtype) -> Callable[[torch.Tensor], object]:
    """The mean of the hidden states by transformers."""
    made: Any = type(model)(model.config)
    made = made.to(dtype).train(False)

    def call(ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = made(ids).last_hidden_state.mean(1)
        return found

    return call


def with_onnxruntime(model: transformers.PreTrainedModel, directory: Path) -> Callable[[torch.Tensor], object]:
    """The hidden states by onnxruntime, with one thread and all optimisations of graphs."""
    import onnxruntime  # type: ignore[import-not-found,unused-ignore] # not a dependency

    path = directory / "model.onnx"
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    axes: Any = ({0: torch.export.Dim("texts")},)
    torch.onnx.export(model, (ids,), str(path), input_names=["ids"], dynamic_shapes=axes, dynamo=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda given: session.run(None, {"ids": given.numpy()})[0].mean(1)


def texts_per_second(shape: dict[str, int], rounds: int, num: int) -> dict[str, dict[str, float]]:
    """Texts per second of each runner on one shape: of its best and of its median round."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(**shape))  # type: ignore[arg-type] # theirs
        model.train(False)
        model.save_pretrained(directory)
        texts = texts_of(num, model.config.vocab_size)
        runs = {f"sluice {dtype}": own(directory, dtype, texts) for dtype in ("float32", "bfloat16")}
        peers = {
            f"transformers {name}": with_transformers(model, getattr(torch, name)) for name in ("float32", "bfloat16")
        }
        if all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnx", "onnxscript")):
            peers["onnxruntime float32"] = with_onnxruntime(model, directory)
        for name, call in peers.items():
            runs |= {f"{name}, {size} at once": run for size, run in in_batches(call, texts)}
        return {name: rates(times, num) for name, times in timed(runs, rounds).items()}


def timed(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run in each round, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    torch.set_num_threads(1)
    for at in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if at:
                found[name].append(time.perf_counter() - start)
        print(f"round {at} of {rounds}", file=sys.stderr, flush=True)
    return found


def rates(times: list[float], num: int) -> dict[str, float]:
    """Texts per second of the best and of the median round."""
    return {"best": round(num / min(times), 1), "median": round(num / median(times), 1)}


class Flood:
    """Keeps texts for vectors in an engine, as many as it may have open."""

    def __init__(self, engine: Engine, texts: list[list[int]]) -> None:
        self._engine, self._texts = engine, itertools.cycle(texts)
        self._names = itertools.count()
        self._num_open = 0
        self.num_done = 0

    def note(self, num_ended: int) -> None:
        """Takes what has ended in a step, and adds as many texts again."""
        self._num_open -= num_ended
        self.num_done += num_ended
        while self._num_open < OPEN:
            ids = tuple(next(self._texts))
            name = f"vector-{next(self._names)}"
            self._engine.add(EngineRequest(name, ids, SamplingParams(), pooling=Pooling.LAST, bypasses_cache=True))
            self._num_open += 1


def gaps(limit: tuple[int, int], steps: int, clock: Clock, *, flooded: bool) -> tuple[list[float], float]:
    """Milliseconds between two tokens of every stream, and texts per second of the flood."""
    budget, most = limit
    config = EngineConfig(
        device="cpu", dtype="float32", threads=1, max_num_batched_tokens=budget, max_num_pooling_tokens=most
    )
    model = read_served(DEMO)
    engine = build_engine(config, model, DEMO, limits_of(config, model, 1 << 20)).engine
    texts = texts_of(STREAMS + 64, model.vocab_size)
    params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
    for at in range(STREAMS):
        engine.add(EngineRequest(f"stream-{at}", tuple(texts[at]), params))
    begun: set[str] = set()
    while len(begun) < STREAMS:
        begun |= {one.request_id for one in engine.step().sampled}
    flood = Flood(engine, texts[STREAMS:])
    if flooded:
        flood.note(0)
    last = dict.fromkeys(begun, clock())
    found, start, num = [], clock(), 0
    while num < (steps // 2) * STREAMS:
        events = engine.step()
        now = clock()
        for one in events.sampled:
            found.append((now - last[one.request_id]) * 1e3)
            last[one.request_id] = now
            num += 1
        if flooded:
            flood.note(len(events.pooled))
    return found, flood.num_done / (clock() - start)


def beside(steps: int, rounds: int, clock: Clock) -> dict[str, dict[str, float]]:
    """p99 gaps of streams with and without the flood, by limit; of the best of several rounds in turns."""
    rows = {}
    plain, flooded, done = ({limit: list[float]() for limit in LIMITS} for _ in range(3))
    for _, limit in itertools.product(range(rounds), LIMITS):
        plain[limit].append(float(np.percentile(gaps(limit, steps, clock, flooded=False)[0], 99)))
        times, rate = gaps(limit, steps, clock, flooded=True)
        flooded[limit].append(float(np.percentile(times, 99)))
        done[limit].append(rate)
    for limit in LIMITS:
        budget, most = limit
        rows[f"budget {budget}, {most or 'any'} of vectors"] = {
            "p99_gap_ms": round(min(plain[limit]), 2),
            "p99_gap_flooded_ms": round(min(flooded[limit]), 2),
            "ratio": round(min(flooded[limit]) / min(plain[limit]), 2),
            "median_ratio": round(median(flooded[limit]) / median(plain[limit]), 2),
            "texts_per_s": round(max(done[limit]), 1),
        }
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of the gaps beside the flood")
    parser.add_argument("--only", choices=("flood",), help="leave out the peers")
    asked = parser.parse_args()
    flood = {"clock": asked.clock, "streams_beside_a_flood": beside(asked.steps, asked.rounds, CLOCKS[asked.clock])}
    if asked.only:
        command = f"python -m benchmarks.encoders --only flood --rounds {asked.rounds} --steps {asked.steps}"
        write("encoders_flood", f"{command} --clock {asked.clock}", flood)
        return
    figures: dict[str, object] = {
        "tokens_in_a_text": LENGTH,
        "versions": {name: version_of(name) for name in ("transformers", "onnxruntime")},
        "texts_per_s": {name: texts_per_second(shape, asked.rounds, asked.texts) for name, shape in SHAPES.items()},
        **flood,
    }
    write("encoders", f"python -m benchmarks.encoders --rounds {asked.rounds} --texts {asked.texts}", figures)


if __name__ == "__main__":
    main()
