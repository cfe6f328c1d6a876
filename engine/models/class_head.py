"""The weight of a classification head: a tensor of the checkpoint, or the rows of two words in the head for logits."""

import torch
from torch import Tensor

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.spans import Span
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.weights import WeightSource


def classification_head(
    config: ModelConfig, source: WeightSource, traits: ArchitectureTraits, head: str
) -> Tensor | None:
    """Returns the weight [classes, hidden], in float32; None for a model without such a head.

    `head` names the weight that makes logits. Raises ServiceError UNIMPLEMENTED for words whose logits are capped.
    """
    if config.labels is None:
        return None
    if config.labels.words is None:
        shape = len(config.labels.names), config.hidden_size
        return source.get("score.weight", shape).to(torch.float32, copy=True)  # the file may be overwritten
    if traits.logit_cap:
        text = f"{config.architecture} caps its logits; a LogitScore of modules.json is supported without a cap"
        raise unsupported("model", text)
    word, other = (
        source.get(f"{head}.weight", (Span(row, row + 1, config.vocab_size), config.hidden_size)).float()
        for row in config.labels.words
    )
    return (word - other).mul(traits.logit_scale)
