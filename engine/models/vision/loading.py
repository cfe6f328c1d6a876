"""Loads a checkpoint's vision tower, by the table of what each configuration is computed with."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from sluice_server.engine.models.layers.loader import Pack
from sluice_server.engine.models.vision.config import VisionConfig
from sluice_server.engine.models.vision.encoding import Encoder, VisionTower
from sluice_server.engine.models.vision.gemma3 import Gemma3Tower
from sluice_server.engine.models.vision.gemma3_config import Gemma3Vision
from sluice_server.engine.models.vision.llava import LlavaTower
from sluice_server.engine.models.vision.llava_config import LlavaVision
from sluice_server.engine.models.vision.mistral3 import Mistral3Tower
from sluice_server.engine.models.vision.mistral3_config import Mistral3Vision
from sluice_server.engine.models.vision.qwen2_5_vl import Qwen25Tower
from sluice_server.engine.models.vision.qwen3_vl import Qwen3Tower
from sluice_server.engine.models.vision.qwen_config import Qwen3Vision, Qwen25Vision
from sluice_server.engine.models.vision.weights import VisionWeights
from sluice_server.engine.models.weights import Checkpoint
from sluice_server.kernels.formats.packer import PLAIN

_TOWERS: Mapping[type[VisionConfig], Callable[[Any, VisionWeights, int], VisionTower]] = {
    Gemma3Vision: Gemma3Tower,
    LlavaVision: LlavaTower,
    Mistral3Vision: Mistral3Tower,
    Qwen25Vision: Qwen25Tower,
    Qwen3Vision: Qwen3Tower,
}


def load_vision(
    directory: Path,
    config: VisionConfig,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    pack: Pack = PLAIN,
) -> Encoder:
    """Reads a checkpoint's tower and what projects its output; `width` is the text model's hidden size.

    Raises ServiceError naming file and tensor.
    """
    weights = VisionWeights(Checkpoint(directory, torch.float32, device), dtype, pack, ("",), "")
    return Encoder(_TOWERS[type(config)](config, weights, width), device)
