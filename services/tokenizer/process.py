"""The tokenizer process: the stage with its encoder and its threads."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.process import Process
from services.telemetry import catalogue
from services.telemetry.metrics import Sample
from services.tokenizer.chat import read_template, unreadable
from services.tokenizer.constraints import Constraints
from services.tokenizer.encoding import TextEncoder
from services.tokenizer.stage import Threads, TokenizerStage
from services.tokenizer.template import check_syntax

NUM_COMPILERS = 2  # so that one grammar that takes long does not hold up the next


def check_template(directory: Path) -> None:
    """Say at start rather than at the first chat that a template is none. Raises ServiceError MODEL_INVALID."""
    source = read_template(directory)
    for template in filter(None, (source.default, source.tool_use)):
        try:
            check_syntax(template)
        except ValueError as error:
            raise unreadable(directory) from error


async def run(process: Process) -> int:
    """Run until told to stop; the exit status."""
    loop = asyncio.get_running_loop()

    def on_loop(call: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(call)

    num_threads = process.config.encoding_threads
    directory, limits = process.contents.directory, process.limits
    encoder = TextEncoder.load(directory, num_threads)
    check_template(directory)
    path = directory / "tokenizer.json"
    with (
        contextlib.closing(encoder),
        contextlib.closing(Constraints(path, limits.vocab_size, process.model.eos_ids, NUM_COMPILERS)) as constraints,
        ThreadPoolExecutor(num_threads, thread_name_prefix="encode") as pool,
    ):
        stage = TokenizerStage(encoder, constraints, limits, Threads(pool, on_loop), process.ring.emit, process.record)
        process.metrics.collect_from(lambda: [Sample(catalogue.OPEN, stage.num_encoding)])
        return await process.run(stage)
