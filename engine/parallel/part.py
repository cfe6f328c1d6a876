"""What a rank loads of a model: its config, traits and weights, as if it were a model of its own."""

from typing import NamedTuple

from sluice_server.engine.models.balanced import BalancedWeights, channel_pairs
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.weights import WeightSource
from sluice_server.engine.parallel.cuts import config_of_rank, traits_of_rank
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.sharded import ShardedWeights


class ModelPart(NamedTuple):
    """A model, or a rank's part of one."""

    config: ModelConfig
    traits: ArchitectureTraits
    source: WeightSource


def part_of(model: ModelPart, ranks: Ranks | None, *, balances: bool) -> ModelPart:
    """Returns the part of a whole model that a rank loads; all of it without ranks.

    `balances`: whether channels are balanced, as weights are going to be rounded.
    """
    config, traits, source = model
    if balances and ranks is None:
        source = BalancedWeights(source, channel_pairs(config, traits))
    elif balances and ranks is not None:
        source = BalancedWeights(source, channel_pairs(config, traits, ranks.shape), ranks.sums)
    if ranks is None:
        return ModelPart(config, traits, source)
    layers = ranks.shape.layers(config.num_layers)
    own = ShardedWeights(source, config, traits, ranks.shape)
    return ModelPart(config_of_rank(config, ranks.shape), traits_of_rank(traits, layers), own)
