"""What a checkpoint's files say of a model, as whoever takes requests for it needs to know it."""

from pathlib import Path

from engine.models.config import ModelConfig
from engine.request import Limits, SamplingParams
from services.gateway.settings import ModelInfo
from services.text_bound import longest_token


def model_info(name: str, revision: str, label: str, directory: Path, model: ModelConfig, limits: Limits) -> ModelInfo:
    """Of the model whose files are in `directory`; requests call it `name`."""
    defaults = model.defaults
    return ModelInfo(
        id=name,
        revision=revision,
        context_length=limits.context_length,
        eos_ids=model.eos_ids,
        defaults=SamplingParams(
            temperature=1.0 if defaults.temperature is None else defaults.temperature,
            top_k=defaults.top_k or 0,
            top_p=1.0 if defaults.top_p is None else defaults.top_p,
            min_p=defaults.min_p or 0.0,
        ),
        architecture=model.architecture,
        label=label,
        longest_token=longest_token(directory / "tokenizer.json"),
    )
