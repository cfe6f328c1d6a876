"""Qwen3 with experts (Yang et al. 2025): Qwen3 whose MLPs, or some of them, are chosen token by token."""

import dataclasses

from engine.models import qwen3
from engine.models.config import ModelConfig
from engine.models.traits import ArchitectureTraits, ExpertTraits


def traits(config: ModelConfig) -> ArchitectureTraits:
    """Shares add up to 1 where the checkpoint says so."""
    renormalises = config.experts is not None and config.experts.renormalises
    return dataclasses.replace(qwen3.traits(config), experts=ExpertTraits(renormalises=renormalises))
