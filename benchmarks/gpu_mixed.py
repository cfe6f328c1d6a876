"""Traffic of every kind on one GPU: arrivals while others decode, a fifth of them with a grammar, a fifth with log
probabilities. Part of `gpu_engine`."""

import dataclasses
import time
from collections.abc import Iterator

import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu_results import Row
from benchmarks.gpu_rig import BLOCK, GpuRig, make_rig, prompts_of
from benchmarks.machine import median
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.sampling.grammars import Grammars

EOS = 256  # the id behind those of all bytes
EVERY = 5  # requests: one of so many has a grammar, the next one log probabilities
NUM_LOGPROBS = 5
PACE = 2  # steps between two arrivals, while there is room
WORDS = LLMatcher.grammar_from_regex("[a-z ]{4000,}")  # ends with no request


def byte_grammars(vocab_size: int) -> Grammars:
    """A compiler of grammars over a tokenizer of single bytes; ids beyond have no text."""
    vocab = {char: at for at, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<end>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return Grammars(LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=EOS))


def params_of(at: int, num_tokens: int, *, is_mixed: bool) -> SamplingParams:
    """What the request at a place asks for."""
    kind = at % EVERY if is_mixed else EVERY
    return SamplingParams(
        max_tokens=num_tokens,
        temperature=0.6,
        seed=at,
        ignore_eos=kind != 0,
        grammar=WORDS if kind == 0 else "",
        logprobs=NUM_LOGPROBS if kind == 1 else -1,
    )


def requests_of(sizes: list[tuple[int, int]], *, is_mixed: bool) -> Iterator[EngineRequest]:
    """Requests of that many tokens in and out."""
    for at, (prompt, (_, num_out)) in enumerate(zip(prompts_of([num for num, _ in sizes]), sizes, strict=True)):
        yield EngineRequest(f"{at}", prompt, params_of(at, num_out, is_mixed=is_mixed))


def mixed(config: ModelConfig, rows: int, sizes: list[tuple[int, int]], max_tokens: int, device: torch.device) -> Row:
    """The share of steps whose forward pass was recorded, and tokens a second, beside the same requests without
    grammars and log probabilities. Raises RuntimeError if a request is cut short."""
    config, blocks = dataclasses.replace(config, eos_ids=(EOS,)), rows * (max(map(sum, sizes)) // BLOCK + 2)
    rig = make_rig(config, rows, blocks, device, grammars=byte_grammars(config.vocab_size), mixed_tokens=max_tokens)
    serve(rig, config.num_layers, rows, sizes[: 2 * EVERY], is_mixed=True)  # compiles what is not recorded
    plain, found = (serve(rig, config.num_layers, rows, sizes, is_mixed=one) for one in (False, True))
    ratio = float(str(found["tokens_per_s"])) / float(str(plain["tokens_per_s"]))
    return {**found, "plain_ms": plain["ms"], "plain_tokens_per_s": plain["tokens_per_s"], "of_plain": ratio}


def serve(rig: GpuRig, num_layers: int, rows: int, sizes: list[tuple[int, int]], *, is_mixed: bool) -> Row:
    """Serves requests that arrive one by one, each at its step."""
    engine, before = rig.engine, rig.runner.progress
    waiting = requests_of(sizes, is_mixed=is_mixed)
    steps, open_, num, took = 0, 0, 0, list[float]()
    begun, coming = time.perf_counter(), next(waiting, None)
    while coming is not None or engine.has_work:
        if coming is not None and open_ < rows and steps % PACE == 0:
            engine.add(coming)
            open_, coming = open_ + 1, next(waiting, None)
        at = time.perf_counter()
        events = engine.step()
        took.append(time.perf_counter() - at)
        steps += 1
        open_ -= sum(event.finish is not None for event in events.sampled)
        num += sum(len(event.token_ids) for event in events.sampled)
    whole = time.perf_counter() - begun
    if num != sum(size for _, size in sizes):
        raise RuntimeError(f"{num} tokens came of {sum(size for _, size in sizes)}")
    layers = rig.runner.progress - before  # a recorded step counts as one
    return {
        "rows": rows,
        "requests": len(sizes),
        "steps": steps,
        "recorded": min(1.0, (steps * num_layers - layers) / max(1, num_layers - 1) / steps),  # the last launches none
        "ms": median(took) * 1e3,
        "tokens_per_s": num / whole,
    }
