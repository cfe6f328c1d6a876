"""Runs the tokenizer process: the stage with its encoder, its threads and its child processes."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sluice_server.engine.request import Limits
from sluice_server.engine.worker.host.aside import call_aside
from sluice_server.services.config import KV_COST
from sluice_server.services.media.image_workers import ImageWorkers
from sluice_server.services.media.preparing import PixelCache
from sluice_server.services.media.processor import read_processor
from sluice_server.services.process.background import num_compilers
from sluice_server.services.process.process import Process
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MetricSample
from sluice_server.services.tokenizer.constraints import Constraints
from sluice_server.services.tokenizer.encoders import Encoders
from sluice_server.services.tokenizer.found_sections import Parsers
from sluice_server.services.tokenizer.loading import load_encoder
from sluice_server.services.tokenizer.prompt_images import PromptImages
from sluice_server.services.tokenizer.prompt_router import PromptRouter
from sluice_server.services.tokenizer.routes import MIDDLE_BYTES, EncodingPool
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage


async def run(process: Process) -> int:
    """Runs the stage until the process is stopped; returns the exit status."""
    loop = asyncio.get_running_loop()

    def on_loop(call: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(call)

    num_threads = process.config.encoding_threads
    directory, limits = process.contents.directory, process.limits
    path = directory / "tokenizer.json"
    with contextlib.ExitStack() as stack:
        sizes = (MIDDLE_BYTES, max(limits.max_prompt_bytes, MIDDLE_BYTES))
        apart = tuple(_apart(stack, directory, limits, size, num_threads) for size in sizes)
        parsers = Parsers(process.config.tool_call_parser, process.config.reasoning_parser)
        template, num_renderers = process.config.chat_template, num_threads * (1 + len(apart))
        loaded = call_aside(lambda: load_encoder(directory, num_renderers, template, parsers))
        encoder = stack.enter_context(contextlib.closing(loaded))
        constraints = stack.enter_context(
            contextlib.closing(Constraints(path, limits.vocab_size, process.model.eos_ids, num_compilers()))
        )
        short, chats = (_threads(stack, num_threads, name) for name in ("encode", "chat"))
        threads = EncodingThreads(short, on_loop, chats, apart)
        router = router_of(process)
        images = images_of(process, stack)
        emit, record = process.ring.emit, process.record
        stage = TokenizerStage(encoder, constraints, limits, threads, emit, record, router, images)
        process.metrics.collect_from(lambda: [MetricSample(catalogue.OPEN, stage.num_encoding)])
        return await process.run(stage)


def images_of(process: Process, stack: contextlib.ExitStack) -> PromptImages | None:
    """Returns what prepares images; None for a model that takes none."""
    form = process.limits.images
    if form is None:
        return None
    num = process.config.media_workers
    workers = ImageWorkers(read_processor(process.contents.directory, form), num=num)
    stack.enter_context(contextlib.closing(workers))
    pixels = PixelCache(workers)
    process.metrics.collect_from(lambda: image_figures(pixels))
    return PromptImages(pixels, process.limits, _threads(stack, num, "images"))


def image_figures(pixels: PixelCache) -> list[MetricSample]:
    """Returns the samples about images."""
    found = [MetricSample(catalogue.IMAGES, num, (what,)) for what, num in pixels.ends.items()]
    return [*found, MetricSample(catalogue.IMAGE_TIME, pixels.busy_s, ("prepare",))]


def router_of(process: Process) -> PromptRouter | None:
    """Returns the router of this process; None where gateways choose engines."""
    config, ring = process.config, process.ring
    if config.routing != KV_COST:
        return None
    engines, block_size = sorted(process.engines.value), process.engine_config.block_size
    router = PromptRouter(ring.process_id, engines, block_size, ring.emit, time.monotonic)
    process.on_engines.append(lambda table: router.change(sorted(table)))
    return router


def _apart(stack: contextlib.ExitStack, directory: Path, limits: Limits, max_bytes: int, num: int) -> EncodingPool:
    """Creates child processes for messages of up to `max_bytes`; they start when first needed."""
    encoders = stack.enter_context(contextlib.closing(Encoders(directory, limits, num)))
    return EncodingPool(max_bytes, _threads(stack, num, "apart"), encoders)


def _threads(stack: contextlib.ExitStack, num: int, name: str) -> ThreadPoolExecutor:
    """Creates a thread pool; at exit its waiting jobs are cancelled."""
    executor = ThreadPoolExecutor(num, thread_name_prefix=name)
    stack.callback(executor.shutdown, cancel_futures=True)
    return executor
