"""What `--batch-invariant` asks of a device: refused at start where it cannot be, and said where it is.

Takes settings, gives what an operator is told of it. Which operations keep their word, `kernels.ops` knows.
"""

import torch

from engine.config import EngineConfig
from engine.formats import Formats, name_of, unusable
from kernels.invariance import is_batch_invariant

ON_CUDA = "tokens do not depend on the batch: products and attention are summed in one order, which is slower"
ON_CPU = "tokens do not depend on the batch: on this CPU they never do"


def check_invariance(config: EngineConfig, formats: Formats, device: torch.device) -> tuple[str, ...]:
    """What is to be said of it, if anything was asked. Raises ServiceError naming the flag and what to take instead."""
    if not config.batch_invariant:
        return ()
    claims = is_batch_invariant(formats.dtype, device, formats.weights, is_fixed=True)
    if broken := [name for name, is_kept in claims.items() if not is_kept]:
        text = f"{', '.join(broken)} in {name_of(formats.dtype)} depend on the batch here"
        raise unusable("batch_invariant", f"{text}; take --dtype float32 or --quantization int8, or leave it out")
    if device.type == "cpu":
        return (ON_CPU,)
    if config.max_draft_width > 1:  # what stands of a tree was summed among what fell
        raise unusable("batch_invariant", f"with --max-draft-width {config.max_draft_width} on {device}: take 1")
    return (ON_CUDA,)
