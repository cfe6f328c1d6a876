"""Builds the engine of an encoder: no cache, no sampling, no speculation; all else is that of a decoder."""

from collections.abc import Iterator
from pathlib import Path

import torch

from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import DEFAULTS, EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.executor.computing import Computing
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.encoders.model import Encoder, EncoderInput, load_encoder
from sluice_server.engine.models.fields import invalid_model
from sluice_server.engine.request import Limits
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.engine.scheduler.settings import settings_of
from sluice_server.engine.worker.encoder_runner import EncoderRunner
from sluice_server.engine.worker.host.allocator import allocator, give_back
from sluice_server.engine.worker.host.aside import call_aside
from sluice_server.engine.worker.host.compute_threads import set_threads, tune_threads
from sluice_server.engine.worker.startup.device_support import ON_CPU
from sluice_server.engine.worker.startup.formats import Formats, choose_formats, name_of, unusable
from sluice_server.kernels.cpu import builds

TRIAL = 32  # tokens of the input that is computed at start
# Settings of what an encoder does not have.
_WITHOUT = {
    "quantization": "weights of an encoder are not rounded",
    "kv_cache_dtype": "an encoder has no KV cache",
    "attention_backend": "an encoder attends without a KV cache",
    "kv_cache_tokens": "an encoder has no KV cache",
    "kv_cache_max_tokens": "an encoder has no KV cache",
    "kv_cache_min_tokens": "an encoder has no KV cache",
    "kv_events": "an encoder has no prefix cache",
    "host_cache_bytes": "an encoder has no KV cache",
    "disk_cache_dir": "an encoder has no KV cache",
    "disk_cache_bytes": "an encoder has no KV cache",
    "disk_cache_ttl_s": "an encoder has no KV cache",
    "shared_cache_bytes": "an encoder has no KV cache",
    "kv_store": "an encoder has no KV cache",
    "weights_offload_bytes": "weights of an encoder stay in memory",
    "max_adapters": "an encoder takes no adapters",
    "adapter_dir": "an encoder takes no adapters",
    "speculation": "an encoder generates nothing",
    "draft_model": "an encoder generates nothing",
    "plugins": "an encoder takes no plugins",
    "tensor_parallel_size": "an encoder is computed by one rank",
    "pipeline_parallel_size": "an encoder is computed by one rank",
    "expert_parallel": "an encoder has no experts",
    "sum_shards": "an encoder is computed by one rank",
}
ON_CPU_ONLY = "encoders are computed on the CPU"


def build_encoder(config: EngineConfig, model_config: ModelConfig, directory: Path, limits: Limits) -> BuiltEngine:
    """Loads the checkpoint of an encoder and builds its engine. Raises ServiceError naming what is wrong and what to
    do."""
    config = config.sized("cpu")
    check_settings(config)
    device = torch.device("cpu")
    formats = choose_formats(config, device)
    set_threads(config)  # before the weights are read: these threads last
    sizes = formats.dtype, device, limits.context_length
    model = call_aside(lambda: load_encoder(directory, model_config, *sizes))
    give_back()
    trial = trial_input(model_config, limits)
    if not bool(model.forward([trial])[0].isfinite().all()):
        text = "the first tokens have no finite hidden states: weights are too large, or belong to another config.json"
        raise invalid_model(directory, f"{text}; download the checkpoint again")
    tuner = tune_threads(config, lambda: model.forward([trial]))
    # Blocks are counted as for a decoder, and stand for no memory: all sequences fit at full length.
    num_blocks = 2 * config.max_num_seqs * -(-limits.context_length // config.block_size)
    cache = KVCache(num_blocks, config.block_size, prefix_caching=False)
    budget = config.max_num_batched_tokens
    scheduler = Scheduler(cache, limits, (), config.max_num_seqs, budget, settings_of(config))
    return BuiltEngine(
        engine=Engine(scheduler, EncoderRunner(model, budget), tuner=tuner),
        computing=_computing(config, formats, model, tuner.count, tuner.why),
        num_blocks=0,
        grammars=Grammars(None),
        tuner=tuner,
        store=None,
    )


def check_settings(config: EngineConfig) -> None:
    """Raises ServiceError for a setting that an encoder has no use for, or that is not built for it."""
    if config.device not in ("auto", "cpu"):
        raise unusable("device", f"{config.device} is not supported for an encoder: take cpu")
    for name, reason in _WITHOUT.items():
        value = getattr(config, name)
        if value != getattr(DEFAULTS, name):
            raise unusable(name, f"{reason}: leave it out")


def trial_input(config: ModelConfig, limits: Limits) -> EncoderInput:
    """Returns an input of ids from all over the vocabulary."""
    num = min(TRIAL, limits.context_length, config.vocab_size)
    return EncoderInput([i * (config.vocab_size // num) for i in range(num)])


def _computing(config: EngineConfig, formats: Formats, model: Encoder, threads: int, why: str) -> Computing:
    return Computing(
        device="cpu",
        mode="native" if builds.is_available() else "eager",
        kernels=model.kernel,
        instruction_set=builds.best_known(),
        dtype=name_of(formats.dtype),
        quantization="",
        cache_dtype=name_of(formats.dtype),
        num_parameters=model.num_parameters,
        threads=threads,
        threads_because=why,
        allocator=allocator(),
        has_fixed_cache=True,
        notes=tuple(_notes(config, formats)),
    )


def _notes(config: EngineConfig, formats: Formats) -> Iterator[str]:
    """Yields what the operator should know."""
    yield from formats.notes
    if config.device == "auto" and torch.cuda.is_available():
        yield ON_CPU_ONLY
    if config.batch_invariant:
        yield ON_CPU
