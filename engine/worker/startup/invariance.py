"""What `--batch-invariant` asks of a device: refused at start where it cannot be, and said where it is.

Takes settings, gives what an operator is told of it. Which operations keep their word, `kernels.ops` knows.
"""

import torch

from engine.config import EngineConfig
from engine.worker.startup.formats import unusable
from kernels.cpu import builds
from kernels.invariance import is_batch_invariant

ON_CUDA = "tokens do not depend on the batch: products and attention are summed in one order, which is slower"
ON_CPU = "tokens do not depend on the batch: on this CPU they never do"


def check_invariance(config: EngineConfig, head_dim: int, device: torch.device) -> tuple[str, ...]:
    """What is to be said of it, if anything was asked. Raises ServiceError naming the flag and what to take instead."""
    if not config.batch_invariant:
        return ()
    claims = is_batch_invariant(device, head_dim, is_fixed=True)
    if broken := [name for name, is_kept in claims.items() if not is_kept]:
        text = f"{', '.join(broken)} depend on the batch on {device} without kernels of our own for heads of {head_dim}"
        advice = (
            "leave it out" if builds.is_available() else "install sluice again beside a C++ compiler, or leave it out"
        )
        raise unusable("batch_invariant", f"{text}; {advice}")
    if device.type == "cpu":
        return (ON_CPU,)
    if config.max_draft_width > 1:  # what stands of a tree was summed among what fell
        raise unusable("batch_invariant", f"with --max-draft-width {config.max_draft_width} on {device}: take 1")
    return (ON_CUDA,)
