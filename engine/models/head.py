"""The last norm of a model and what reads it: logits of its vocabulary, and the classes of a classifier."""

import torch
from torch import Tensor

from sluice_server.engine.models.class_head import classification_head
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.layers.decoder import stream_eps
from sluice_server.engine.models.layers.loader import LayerLoader
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.models.vocabulary import Vocabulary
from sluice_server.engine.models.weights import WeightSource
from sluice_server.kernels import ops
from sluice_server.kernels.reference.adjust import TokenMask


class ModelHead:
    """The last norm and the heads behind it."""

    def __init__(
        self,
        config: ModelConfig,
        traits: ArchitectureTraits,
        loader: LayerLoader,
        source: WeightSource,
        whole: WeightSource,
        vocabulary: Vocabulary,
    ) -> None:
        """`source` has this rank's part of `whole`."""
        self._vocabulary = vocabulary
        self._eps = stream_eps(config, traits)
        norm = self._plain_norm = loader.norm("model.norm", config.hidden_size)
        if traits.logit_scale != 1.0:  # of the logits, where it costs nothing
            norm = norm.float() * traits.logit_scale
        self._norm = loader.kept(norm)
        # A checkpoint may leave out a head that is tied.
        tied = config.tied_embeddings or not source.has("lm_head.weight")
        head = "model.embed_tokens" if tied else "lm_head"
        self._head = loader.head(head, (vocabulary.num_rows, config.hidden_size), norm)
        self._logit_cap = traits.logit_cap
        self._classes = classification_head(config, whole, traits, head)

    @property
    def kernel(self) -> str:
        """The name of the kernel that multiplies."""
        return self._head.kernel

    def fix(self) -> None:
        """Makes the head batch-invariant; see `Model.fix`."""
        self._head = self._head.fixed()

    def normed(self, hidden: Tensor) -> Tensor:
        """Implements `Model.normed`."""
        return ops.rms_norm(hidden, self._plain_norm, self._eps, torch.float32)

    def classes(self, normed: Tensor) -> Tensor:
        """Implements `Model.classes`."""
        assert self._classes is not None, "the gateway asks models with such a head only"
        return normed @ self._classes.T

    def logits(self, hidden: Tensor, out: Tensor | None = None, wanted: TokenMask | None = None) -> Tensor:
        """Implements `Model.logits` and `Model.wanted_logits`."""
        is_own = self._vocabulary.num_logits == self._vocabulary.num_rows
        own = (out, wanted) if is_own else (None, None)
        logits = ops.linear_normed_wide(hidden, self._norm, self._eps, self._head, *own)
        found = self._vocabulary.gathered(ops.soft_cap_(logits, self._logit_cap) if self._logit_cap else logits)
        return found if out is None or found is out else out.copy_(found)
