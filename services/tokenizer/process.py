"""The tokenizer process: the stage with its encoder and its threads."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from services.process import Process
from services.tokenizer.encoding import TextEncoder
from services.tokenizer.stage import TokenizerStage


async def run(process: Process) -> int:
    """Run until told to stop; the exit status."""
    loop = asyncio.get_running_loop()

    def on_loop(call: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(call)

    num_threads = process.config.encoding_threads
    encoder = TextEncoder.load(process.source.directory, num_threads)
    with (
        contextlib.closing(encoder),
        ThreadPoolExecutor(num_threads, thread_name_prefix="encode") as pool,
    ):
        stage = TokenizerStage(encoder, process.limits, pool, process.ring.emit, on_loop, process.record)
        process.metrics.collect_from(lambda: {"sluice_requests_open": stage.num_encoding})
        return await process.run(stage)
