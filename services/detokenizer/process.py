"""Runs the detokenizer process: the stage with its decoder."""

import asyncio
import time

from sluice_server.engine.worker.host.aside import call_aside
from sluice_server.services.detokenizer.flush_timer import Alarm
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.process.process import Process
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.metrics import MetricSample
from sluice_server.services.tokenizer.encoding import TextEncoder


async def run(process: Process) -> int:
    """Runs the stage until the process is stopped; returns the exit status."""
    encoder = call_aside(lambda: TextEncoder.load(process.contents.directory))
    timer = Alarm(time.monotonic, asyncio.get_running_loop().call_later)
    max_interval_s = process.config.text_interval_ms / 1e3
    stage = DetokenizerStage(encoder, process.ring.emit, process.record, process.ring.leases, timer, max_interval_s)
    process.ring.handlers.on_probe = stage.probed
    process.metrics.collect_from(
        lambda: [MetricSample(catalogue.OPEN, stage.num_open), MetricSample(catalogue.LATE_TOKENS, stage.num_late)]
    )
    return await process.run(stage)
