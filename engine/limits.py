"""What a model and the settings allow together: the one `Limits` value that every stage of a service derives alike.

Stdlib only, as every stage needs it.
"""

from engine.config import EngineConfig
from engine.errors import Code, ServiceError
from engine.models.config import ModelConfig
from engine.request import Limits


def limits_of(config: EngineConfig, model: ModelConfig, max_prompt_bytes: int) -> Limits:
    """Raises ServiceError when --max-model-len is longer than the model's context."""
    if config.max_model_len > model.context_length:
        raise ServiceError(
            Code.INVALID_ARGUMENT,
            "INVALID_SETTING",
            f"--max-model-len: {config.max_model_len} is above the model's context of {model.context_length} tokens",
        )
    return Limits(
        context_length=config.max_model_len or model.context_length,
        vocab_size=model.vocab_size,
        max_prompt_bytes=max_prompt_bytes,
        max_draft_tokens=0 if config.speculation == "none" else config.max_draft_tokens,
    )
