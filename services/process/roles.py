"""Starts one process of the ring: title, signals, telemetry and ring connection, then the body of its role.

This is what `sluice serve --role …` runs, under a supervisor or alone in a container.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping
from typing import assert_never

import setproctitle
import uvloop

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.slices import SHORT_S, take_turns_of
from sluice_server.engine.worker.host.torch_import import import_torch
from sluice_server.services.config import WORKER, ServiceConfig, bad_setting
from sluice_server.services.memory.watch import MemoryWatch
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.beats import Beats
from sluice_server.services.process.heartbeat import Heartbeat
from sluice_server.services.process.joining import Common, join, read_files
from sluice_server.services.process.process import Process
from sluice_server.services.process.supervised import die_with_supervisor
from sluice_server.services.ring.figures import figures as ring_figures
from sluice_server.services.telemetry import logs, names
from sluice_server.services.telemetry.metrics import Metrics
from sluice_server.services.telemetry.push import pushing
from sluice_server.services.telemetry.tracing import Tracer, TraceSampling

LOSSES = (signal.SIGUSR1, signal.SIGUSR2)  # sent to gateways when a process died, or restarts as planned


def run_role(engine_config: EngineConfig, config: ServiceConfig) -> int:
    """Run one process until it is asked to stop. Returns its exit status. Raises ServiceError for unusable settings."""
    if config.role == WORKER:
        import_torch()
        from sluice_server.services.ranks.process import run_worker  # loads torch

        return run_worker(engine_config, config, config.process_id or f"{WORKER}-1")
    role = Role(config.role)
    process_id = config.process_id or f"{role}-0"
    setproctitle.setproctitle(f"sluice: {process_id}")
    logs.configure(config.log_level, config.log_format, process_id)
    die_with_supervisor()
    take_turns_of(SHORT_S)
    for number in LOSSES:  # until a gateway installs its handlers
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(engine_config, config, role, process_id))


async def _run(engine_config: EngineConfig, config: ServiceConfig, role: Role, process_id: str) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    resource = {"service.name": names.SERVICE_NAME, "service.instance.id": process_id, names.ROLE: str(role)}
    common = Common(
        role=role,
        process_id=process_id,
        tracer=Tracer.create(
            resource, config.otlp_endpoint, TraceSampling(config.trace_sample_ratio, config.trace_slow_s)
        ),
        metrics=Metrics(role, process_id),
        heart=open_heart(config, process_id),
        stopping=stopping,
        beats=Beats(loop.call_later),
        memory=MemoryWatch(config.memory_warn_share) if config.memory_watch else None,
    )
    try:
        common.metrics.collect_from(common.tracer.figures)
        if role is Role.GATEWAY:
            from sluice_server.services.gateway import process as gateway  # loads grpc

            return await gateway.run(engine_config, config, common, lambda: _telling(config, common, resource))
        return await _run_stage(engine_config, config, common, resource)
    finally:
        if common.memory is not None:
            await common.memory.close()
        common.heart.close()
        common.tracer.shutdown()


async def _run_stage(
    engine_config: EngineConfig, config: ServiceConfig, common: Common, resource: Mapping[str, str]
) -> int:
    files = read_files(engine_config, config, with_weights=common.role is Role.ENGINE)
    process = join(engine_config, config, files, common)
    common.metrics.collect_from(lambda: ring_figures([process.ring]))
    try:
        async with _telling(config, common, resource):
            return await _body(process)
    finally:
        await process.leave()


@contextlib.asynccontextmanager
async def _telling(config: ServiceConfig, common: Common, resource: Mapping[str, str]) -> AsyncIterator[None]:
    """Serves and sends the metrics of a process during the block."""
    if config.metrics_port:
        from sluice_server.services.telemetry.prometheus import serve as serve_metrics  # loads an HTTP server

        serve_metrics(common.metrics, config.metrics_host, config.metrics_port)
    async with pushing(common.metrics, resource, config.otlp_endpoint):
        yield


async def _body(process: Process) -> int:
    """Run the role's body. Imports are local: each process loads only what its role needs, such as torch or grpc."""
    match process.role:
        case Role.TOKENIZER:
            from sluice_server.services.tokenizer import process as tokenizer

            return await tokenizer.run(process)
        case Role.ENGINE:
            import_torch()
            from sluice_server.services.engine import process as engine_process

            return await engine_process.run(process)
        case Role.DETOKENIZER:
            from sluice_server.services.detokenizer import process as detokenizer

            return await detokenizer.run(process)
        case Role.GATEWAY:
            raise AssertionError("a gateway is in the rings of several models")
        case _:
            assert_never(process.role)


def open_heart(config: ServiceConfig, process_id: str) -> Heartbeat:
    """Returns the heartbeat file. Raises ServiceError if its directory cannot be used."""
    try:
        return Heartbeat(config.heartbeat_dir, process_id)
    except OSError as error:
        raise bad_setting("heartbeat_dir", f"cannot write to {config.heartbeat_dir}: {error.strerror}") from error
