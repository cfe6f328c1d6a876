"""Measures vectors of texts beside peers, on one core.

    python -m benchmarks.pooling.texts [--rounds 5] [--texts 16] [--only Qwen3-0.6B,MiniLM-L6] [--peers vLLM]

Texts of 128 tokens through the engine, scheduler included, on random weights of published shapes: two encoders, whose
hidden states are averaged, and a decoder, of which the last token's counts. The peers are transformers at its best
batch size, vLLM's pooling where it is installed (benchmarks/cpu/README.md), which is given all texts at once, and, for
encoders, onnxruntime with onnx and onnxscript (TEI's backend on CPUs). All take turns, so that the machine's moods hit
them alike; the best round counts, the median is kept. vLLM's vectors are compared with ours first.
"""

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.cpu.servers import VENVS, add_tokenizer, served
from benchmarks.cpu.shapes import CACHE
from benchmarks.machine import median, version_of, write
from sluice_server.engine.build import build_engine
from sluice_server.engine.build_encoder import build_encoder
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams

WORKER = Path(__file__).parents[1] / "cpu" / "peers" / "vllm_pooling_worker.py"
LENGTH = 128
BATCHES = (1, 4, 16)  # texts in a call of a peer
ENCODERS: dict[str, dict[str, int]] = {
    "MiniLM-L6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
}
DECODERS = {"Qwen3-0.6B": "474M"}  # the shape but for its vocabulary, of which vectors read a few rows
DTYPES = ("float32", "bfloat16")
PEERS = ("transformers", "onnxruntime", "vLLM")
Run = Callable[[], object]


def texts_of(num: int, vocab_size: int) -> list[list[int]]:
    """Texts of random ids."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocab_size, (num, LENGTH), generator=generator).tolist()


def own(directory: Path, dtype: str, texts: list[list[int]]) -> Callable[[], list[bytes]]:
    """Computes all texts with an engine of this package; returns their vectors."""
    config, model = EngineConfig(device="cpu", dtype=dtype, threads=1, prefix_caching=False), read_served(directory)
    build = build_encoder if model.encoder is not None else build_engine
    engine = build(config, model, directory, limits_of(config, model, 1 << 20)).engine
    pooling = Pooling.MEAN if model.encoder is not None else Pooling.LAST
    names = itertools.count()

    def run() -> list[bytes]:
        first = next(names) * len(texts)
        for at, ids in enumerate(texts):
            engine.add(EngineRequest(f"{first + at:032x}", tuple(ids), SamplingParams(), pooling=pooling))
        found: dict[str, bytes] = {}
        while engine.has_work:
            found |= {one.request_id: one.vector for one in engine.step().pooled}
        return [found[name] for name in sorted(found)]

    return run


def in_batches(call: Callable[[torch.Tensor], object], texts: list[list[int]]) -> Iterator[tuple[int, Run]]:
    """Computes all texts by calls of each batch size."""
    for size in BATCHES:
        parts = torch.tensor(texts).split(size)
        yield size, lambda parts=parts: [call(part) for part in parts]  # type: ignore[misc] # bound now


def with_transformers(model: transformers.PreTrainedModel, dtype: str) -> Callable[[torch.Tensor], object]:
    """The hidden states of all tokens by transformers."""
    made: Any = type(model)(model.config)
    made = made.to(getattr(torch, dtype)).train(False)

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


class Vllm:
    """vLLM's engine in an environment of its own."""

    def __init__(self, directory: Path, dtype: str, log: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        command = [str(VENVS / "vllm" / "bin" / "python"), str(WORKER), str(directory), dtype]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("a"), text=True, env=environment
        )
        self._answer()

    def vectors(self, texts: list[list[int]]) -> list[float]:
        """Computes all texts; returns the vector of the first."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"texts": texts}) + "\n")
        self._process.stdin.flush()
        found: list[float] = self._answer()["first"]
        return found

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError(f"vLLM ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def vllm(directory: Path, dtype: str, texts: list[list[int]], expected: bytes) -> Iterator[dict[str, Run]]:
    """vLLM's run, where it is installed and starts. Prints the cosine of its first vector and ours."""
    log = CACHE / "vllm_pooling.log"
    try:
        peer = Vllm(directory, dtype, log)
    except (OSError, ChildProcessError) as error:
        print(f"vLLM {dtype} is left out: {error}; see {log}", file=sys.stderr, flush=True)
        yield {}
        return
    with contextlib.closing(peer):
        theirs, ours = torch.tensor(peer.vectors(texts)), torch.frombuffer(bytearray(expected), dtype=torch.float32)
        print(f"vLLM {dtype}: cosine {torch.cosine_similarity(theirs, ours, 0):.5f}", file=sys.stderr, flush=True)
        yield {f"vLLM {dtype}": lambda: peer.vectors(texts)}


def runs_of(
    directory: Path, model: transformers.PreTrainedModel, num: int, asked: Sequence[str]
) -> Iterator[dict[str, Run]]:
    """The runs of everybody asked, a dtype at a time: models of a few GB are not all held at once."""
    for dtype in DTYPES:
        texts = texts_of(num, model.config.vocab_size)
        ours = own(directory, dtype, texts)
        runs: dict[str, Run] = {f"sluice {dtype}": ours}
        peers = {f"transformers {dtype}": with_transformers(model, dtype)} if "transformers" in asked else {}
        if (
            "onnxruntime" in asked
            and dtype == "float32"
            and isinstance(model, transformers.BertModel)
            and all(importlib.util.find_spec(name) for name in ("onnxruntime", "onnx", "onnxscript"))
        ):
            peers["onnxruntime float32"] = with_onnxruntime(model, directory)
        for name, call in peers.items():
            runs |= {f"{name}, {size} at once": run for size, run in in_batches(call, texts)}
        if "vLLM" not in asked:
            yield runs
            continue
        with vllm(directory, dtype, texts, ours()[0]) as peer:
            yield runs | peer


def texts_per_second(name: str, rounds: int, num: int, peers: Sequence[str]) -> dict[str, dict[str, float]]:
    """Texts per second of each runner on one shape: of its best and of its median round."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        if name in ENCODERS:
            directory = Path(folder)
            made = transformers.BertModel(transformers.BertConfig(**ENCODERS[name]))  # type: ignore[arg-type] # theirs
            made.save_pretrained(directory)
            add_tokenizer(directory)
        else:
            directory = served(DECODERS[name])
            about = transformers.AutoConfig.from_pretrained(directory)
            made = transformers.AutoModel.from_config(about)  # type: ignore[no-untyped-call] # theirs
        found: dict[str, dict[str, float]] = {}
        for runs in runs_of(directory, made, num, peers):
            found |= {name: rates(times, num) for name, times in timed(runs, rounds).items()}
        return found


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


def main() -> None:
    """Measure and write the result."""
    shapes = (*DECODERS, *ENCODERS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--only", default=",".join(shapes), help="shapes, with commas between them")
    parser.add_argument("--peers", default=",".join(PEERS), help="peers, with commas between them")
    asked = parser.parse_args()
    names, peers = asked.only.split(","), asked.peers.split(",")
    for option, given, there in (("--only", names, shapes), ("--peers", peers, PEERS)):
        if unknown := [name for name in given if name not in there]:
            parser.error(f"{option} {unknown[0]!r}: there is {', '.join(there)}")
    figures: dict[str, object] = {
        "tokens_in_a_text": LENGTH,
        "versions": {name: version_of(name) for name in ("transformers", "onnxruntime")},
        "texts_per_s": {name: texts_per_second(name, asked.rounds, asked.texts, peers) for name in names},
    }
    command = f"python -m benchmarks.pooling.texts --rounds {asked.rounds} --texts {asked.texts}"
    command += f" --only {asked.only} --peers {asked.peers}"
    write("pooling_texts", command, figures)


if __name__ == "__main__":
    main()
