"""The detokenizer process: the stage with its decoder."""

from services.detokenizer.stage import DetokenizerStage
from services.process import Process
from services.tokenizer.encoding import TextEncoder


async def run(process: Process) -> int:
    """Run until told to stop; the exit status."""
    encoder = TextEncoder.load(process.source.directory)
    stage = DetokenizerStage(encoder, process.ring.emit, process.record, process.ring.leases)
    process.metrics.collect_from(
        lambda: {"sluice_requests_open": stage.num_open, "sluice_late_tokens_total": stage.num_late}
    )
    return await process.run(stage)
