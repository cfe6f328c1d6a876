"""Random encoders, written by `transformers` and computed by it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, HIDDEN, POSITIONS = 101, 48, 66
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
}
ROBERTA = {**COMMON, "type_vocab_size": 1, "pad_token_id": 1}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "Bert": (transformers.BertConfig, COMMON),
    "Roberta": (transformers.RobertaConfig, ROBERTA),
    "XLMRoberta": (transformers.XLMRobertaConfig, ROBERTA),
    "MPNet": (transformers.MPNetConfig, COMMON),
    "DistilBert": (
        transformers.DistilBertConfig,
        {
            "vocab_size": VOCAB,
            "dim": HIDDEN,
            "n_layers": 3,
            "n_heads": 4,
            "hidden_dim": 80,
            "max_position_embeddings": POSITIONS,
            "initializer_range": 0.2,
        },
    ),
    "ModernBert": (
        transformers.ModernBertConfig,
        {
            **COMMON,
            "num_hidden_layers": 4,
            "local_attention": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
}


@dataclasses.dataclass(frozen=True)
class RandomEncoder:
    """A checkpoint and the oracle that wrote it."""

    directory: Path
    model: "transformers.PreTrainedModel"

    def states(self, ids: Sequence[int], num_first: int | None = None) -> torch.Tensor:
        """The hidden states of one input, computed alone."""
        base = self.model.base_model
        with torch.inference_mode():
            states: torch.Tensor = base(torch.tensor([list(ids)]), **self._types(len(ids), num_first)).last_hidden_state
        return states[0]

    def classes(self, ids: Sequence[int], num_first: int | None = None) -> torch.Tensor:
        """What its head says of one input."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([list(ids)]), **self._types(len(ids), num_first)).logits
        return logits[0]

    def _types(self, num: int, num_first: int | None) -> dict[str, torch.Tensor]:
        if num_first is None or not isinstance(self.model.config, transformers.BertConfig):
            return {}
        types = torch.zeros(1, num, dtype=torch.int64)
        types[0, num_first:] = 1
        return {"token_type_ids": types}


def make_encoder(
    directory: Path,
    family: str,
    kind: str = "Model",
    **fields: Any,  # noqa: ANN401 # of the config's types
) -> RandomEncoder:
    """Writes a random encoder of the class `family` + `kind`."""
    config_class, values = FAMILIES[family]
    config = config_class(**{**values, **fields})
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}{kind}")(config)
    model.train(False)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are constant at first
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return RandomEncoder(directory, model)
