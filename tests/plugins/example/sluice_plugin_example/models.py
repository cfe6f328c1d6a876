"""Llama with a bias on its logits, a vector `lm_head.bias` of the checkpoint."""

import torch
from torch import Tensor

from sluice_server.engine.models import architectures
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.loader import Pack
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.weights import WeightSource
from sluice_server.engine.plugins.interface import API, ModelPlugin


class BiasedLlama(Model):
    """Adds a vector to the logits."""

    def __init__(  # noqa: PLR0913 # as `Model`
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        pack: Pack,
        traits: ArchitectureTraits | None = None,
    ) -> None:
        super().__init__(config, source, dtype, device, num_positions, pack, traits)
        self._bias = source.get("lm_head.bias", (config.vocab_size,)).float()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits float32 [R, vocab] of hidden [R, hidden]."""
        return super().logits(hidden).add_(self._bias)


BIASED_LLAMA = ModelPlugin(api=API, traits=architectures.llama, model=BiasedLlama)
