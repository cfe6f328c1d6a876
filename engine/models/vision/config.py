"""Reads what a checkpoint's config.json says of its vision tower, by the table of architectures that take images.

Depends on the standard library only, as processes without torch read it too.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.fields import Fields, read_json, shown
from sluice_server.engine.models.vision.gemma3_config import Gemma3Vision, read_gemma3
from sluice_server.engine.models.vision.llava_config import LlavaVision, read_llava
from sluice_server.engine.models.vision.mistral3_config import Mistral3Vision, read_mistral3
from sluice_server.engine.models.vision.qwen_config import Qwen3Vision, Qwen25Vision, read_qwen2_5, read_qwen3

VisionConfig: TypeAlias = LlavaVision | Qwen25Vision | Qwen3Vision | Mistral3Vision | Gemma3Vision
_READERS: Mapping[str, Callable[[Fields], VisionConfig]] = {
    "Gemma3ForConditionalGeneration": read_gemma3,
    "LlavaForConditionalGeneration": read_llava,
    "Mistral3ForConditionalGeneration": read_mistral3,
    "Qwen2_5_VLForConditionalGeneration": read_qwen2_5,
    "Qwen3VLForConditionalGeneration": read_qwen3,
}
WITH_IMAGES = tuple(_READERS)


def read_vision(directory: Path) -> VisionConfig:
    """Reads a checkpoint directory. Raises ServiceError, naming file, field and value."""
    path = directory / "config.json"
    whole = Fields(path, read_json(path))
    named = whole.values.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in WITH_IMAGES:
        text = f"images for {shown(named)} are not supported; they are for {', '.join(WITH_IMAGES)}"
        raise unsupported("architectures", text)
    return _READERS[str(named[0])](whole)
