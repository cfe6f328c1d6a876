"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): windows in every other layer, norms before and behind, soft-caps."""

import dataclasses

from engine.models import gemma
from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """Gemma's, with a scale of its own for the scores, and with caps where the checkpoint has them."""
    return dataclasses.replace(
        gemma.traits(config),
        post_norms=True,
        query_scalar=config.query_scalar,
        score_cap=config.score_cap,
        logit_cap=config.logit_cap,
    )
