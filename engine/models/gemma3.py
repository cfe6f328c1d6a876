"""Gemma 3's text model (Gemma Team 2025, arXiv 2503.19786): Gemma 2 with head norms, and another rotary base in layers
with a window. It has no caps; a checkpoint that asks for one of the scores is refused, as its reference ignores it."""

import dataclasses

from engine.errors import unsupported
from engine.models import gemma2
from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """Gemma 2's with norms of query and key heads. Raises ServiceError UNIMPLEMENTED."""
    if config.score_cap:
        text = f"attn_logit_softcapping is {config.score_cap}; Gemma 3 is supported without"
        raise unsupported("attn_logit_softcapping", text)
    return dataclasses.replace(gemma2.traits(config), qk_norm=True)
