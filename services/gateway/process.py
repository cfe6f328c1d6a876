"""The gateway process: builds the settings from the configuration, opens the models and serves until it is drained."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import stage_lost
from sluice_server.services.config import ServiceConfig
from sluice_server.services.gateway.connections.memory import share_one_heap
from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.gateway.lanes import GatewayLanes
from sluice_server.services.gateway.opening import settings_of
from sluice_server.services.gateway.requests.fetching import ImageFetches
from sluice_server.services.media.fetch_workers import FetchWorkers
from sluice_server.services.media.urls import hosts_of
from sluice_server.services.process import absences
from sluice_server.services.process.joining import Common
from sluice_server.services.process.library_pages import give_back_library_pages
from sluice_server.services.process.supervised import TABLE_CHANGED
from sluice_server.services.ring.figures import figures as ring_figures
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.gathering import Gathering
from sluice_server.services.telemetry.metrics import MetricSample
from sluice_server.services.telemetry.observer import GatewayObserver
from sluice_server.services.telemetry.request_log import RequestLog

FETCHES = 2  # images that are fetched at once


async def run(
    engine: EngineConfig,
    config: ServiceConfig,
    common: Common,
    telling: Callable[[], AbstractAsyncContextManager[None]],
) -> int:
    """Serves until the process is told to stop, then drains; returns the exit status. `telling` serves and sends its
    metrics. Raises ServiceError, LISTEN_FAILED for one."""
    share_one_heap()  # before grpc starts its threads
    log = RequestLog(is_on=config.log_requests, shows_prompts=config.log_prompts)
    ends = Gathering(asyncio.get_running_loop().call_later)
    observer = GatewayObserver(
        common.tracer, common.metrics, lambda envelope: lanes.keep_trace(envelope), log, ends.add
    )
    gateway = Gateway(settings_of(engine, config, common.process_id), observer)
    lanes = GatewayLanes(gateway, engine, config, common)
    common.metrics.collect_from(lambda: ring_figures(lanes.rings))
    common.metrics.collect_from(lambda: figures(gateway))
    if common.memory is not None:
        watch = common.memory
        gateway.memory_level = lambda: watch.level
    with contextlib.ExitStack() as closing:
        _fetch_images(gateway, hosts_of(config.media_from), closing)
        try:
            await lanes.open_first()
            async with telling():
                return await _serve(config, common, gateway, lanes)
        finally:
            ends.flush()
            await lanes.leave()


async def _serve(config: ServiceConfig, common: Common, gateway: Gateway, lanes: GatewayLanes) -> int:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: lanes.lost(absent_of(config)))
    loop.add_signal_handler(signal.SIGUSR2, lambda: lanes.lost(absent_of(config), planned=True))
    loop.add_signal_handler(TABLE_CHANGED, lanes.look_now)
    loop.add_signal_handler(signal.SIGQUIT, lambda: end_at_once(gateway, common.stopping))
    await gateway.start()
    give_back_library_pages()  # of gRPC, which reads 6 MB of its own as it starts
    following = asyncio.create_task(lanes.follow(), name="models")
    try:
        await common.stopping.wait()
        await gateway.stop(config.grace_s)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return 0


def _fetch_images(gateway: Gateway, hosts: frozenset[str], closing: contextlib.ExitStack) -> None:
    """Has the gateway fetch images by their URLs, if there are hosts to fetch them from."""
    if not hosts:
        return
    workers = closing.enter_context(contextlib.closing(FetchWorkers(hosts, FETCHES)))
    executor = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
    closing.callback(executor.shutdown, cancel_futures=True)
    on_loop = asyncio.get_running_loop().call_soon_threadsafe
    gateway.books.fetches = ImageFetches(workers.fetch, executor, on_loop)


def absent_of(config: ServiceConfig) -> frozenset[str]:
    """Returns the ids of processes that the supervisor has found gone; none if it does not say."""
    return absences.read(Path(config.heartbeat_dir)) if config.heartbeat_dir else frozenset()


def end_at_once(gateway: Gateway, stopping: asyncio.Event) -> None:
    """Ends open requests as UNAVAILABLE at once (SIGQUIT: the service ends and cannot finish anything). Clients get a
    status with a message, not a broken connection."""
    gateway.end_all(stage_lost("serving"))
    stopping.set()


def figures(gateway: Gateway) -> list[MetricSample]:
    """Returns the metrics that the gateway itself measures: open requests, reserved tokens, gaps between tokens."""
    managers = [lane.manager for lane in gateway.models]
    return [
        MetricSample(catalogue.OPEN, sum(len(one.requests) for one in managers)),
        MetricSample(catalogue.RESERVED, gateway.books.admission.num_tokens),
        MetricSample(catalogue.GAP, gateway.books.gaps.snapshot()),
        *[
            MetricSample(catalogue.ROUTED, num, way)
            for one in managers
            for way, num in list(one.engines.routed.items())
        ],
    ]
