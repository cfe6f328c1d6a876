"""Describes model, server and load in messages of `vllm.grpc.engine`: all engines together are one worker of rank 0."""

import datetime

import msgspec
from sluice.v1 import control_pb2

from sluice_server.engine.executor.computing import Computing
from sluice_server.engine.parameters import FROM_MODEL
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.gateway.vllm.contract import vllm_engine_pb2 as vllm


def model_info(settings: GatewaySettings) -> vllm.GetModelInfoResponse:
    """Describes the model. Paths of this host are left out: a gateway in front gets the tokenizer by GetTokenizer."""
    model, limits = settings.model, settings.limits
    defaults = {row.name: row.of(model.defaults) for row in FROM_MODEL}
    return vllm.GetModelInfoResponse(
        model_path=model.id,
        served_model_name=model.id,
        is_generation=model.generates,
        max_context_length=model.context_length,
        max_req_input_len=model.context_length - 1,
        vocab_size=limits.vocab_size,
        architectures=[model.architecture],
        eos_token_ids=model.eos_ids,
        default_sampling_params_json=msgspec.json.encode(defaults).decode(),
    )


def server_info(load: control_pb2.Load, how: Computing, uptime_s: float) -> vllm.GetServerInfoResponse:
    """Describes the server; `how` says how its engine computes."""
    return vllm.GetServerInfoResponse(
        server_type="sluice",
        active_requests=load.open_requests,
        uptime_seconds=uptime_s,
        data_parallel_size=1,
        block_size=load.engines[0].block_size if load.engines else 0,
        kv_cache_dtype=how.cache_dtype,
        model_dtype=how.dtype,
        constrained_decoding_start="first_token",
    )


def loads(load: control_pb2.Load, version: str) -> vllm.GetLoadsResponse:
    """Describes the load of all engines together."""
    now = datetime.datetime.now(datetime.UTC).isoformat()
    return vllm.GetLoadsResponse(timestamp=now, version=version, dp_rank_count=1, loads=[scheduler_load(load)])


def scheduler_load(load: control_pb2.Load) -> vllm.SchedulerLoad:
    """Sums the engines' loads."""
    engines = load.engines
    total = sum(one.total_blocks * one.block_size for one in engines)
    used = sum((one.total_blocks - one.free_blocks) * one.block_size for one in engines)
    queried = sum(one.prefix_query_tokens for one in engines)
    running = sum(one.running_requests for one in engines)
    waiting = sum(one.waiting_requests for one in engines)
    return vllm.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=used,
        max_total_num_tokens=total,
        token_usage=used / total if total else 0.0,
        gen_throughput=sum(one.tokens_per_second for one in engines),
        cache_hit_rate=sum(one.prefix_hit_tokens for one in engines) / queried if queried else 0.0,
    )
