"""Decides whether a service takes images: from its settings and the model's files; every process decides the same.

A model whose images cannot be served is served for text, and requests with images are refused with the reason.
"""

import dataclasses
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.images import ImageForm
from sluice_server.engine.models.config import ModelConfig, named_architecture
from sluice_server.engine.models.fields import Fields, read_json
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.text_model import WITH_TEXT
from sluice_server.engine.models.vision.config import WITH_IMAGES, read_vision
from sluice_server.engine.plugins.entry_points import NO_PLUGINS, Plugins
from sluice_server.engine.request import Limits
from sluice_server.services.config import GPU
from sluice_server.services.media.processor import read_processor
from sluice_server.services.media.resizing import ToCells, Within


def limits_for(
    engine: EngineConfig, model: ModelConfig, directory: Path, max_prompt_bytes: int, plugins: Plugins = NO_PLUGINS
) -> Limits:
    """Returns the limits of requests, images included. Raises as `limits_of`."""
    limits = limits_of(engine, model, max_prompt_bytes, plugins)
    why = _why_none(engine, directory)
    if why:
        return dataclasses.replace(limits, why_no_images=why)
    try:
        return dataclasses.replace(limits, images=_form(directory, limits))
    except ServiceError as error:
        return dataclasses.replace(limits, why_no_images=f"of its files: {error.message}")


def _why_none(engine: EngineConfig, directory: Path) -> str:
    """Returns why no images are taken, whatever the files say of them; "" if they may be."""
    path = directory / "config.json"
    architecture = named_architecture(Fields(path, read_json(path)))
    if architecture not in WITH_TEXT:
        return "the model takes text only"
    if architecture not in WITH_IMAGES:
        return f"images for {architecture} are not built yet"
    if not engine.images:
        return "it was started with --no-images"
    if engine.device == "cuda" or (engine.device == "auto" and GPU.exists()):
        return "they are computed with --device cpu only yet"
    return ""


def _form(directory: Path, limits: Limits) -> ImageForm:
    """Returns the form of images. Raises ServiceError for files that say nothing of it, or contradict each other.

    Images of any size have as many tokens as the preprocessor allows, and fit the context.
    """
    form = read_vision(directory).form
    resizing = read_processor(directory, form).resizing
    if isinstance(resizing, ToCells | Within):
        most = form.num_tokens(resizing.most_cells)
        form = dataclasses.replace(form, most_tokens=min(form.most_tokens, most, limits.context_length))
    if not 0 <= form.token_id < limits.vocab_size:
        text = f"is {form.token_id}; the model has {limits.vocab_size} ids"
        raise Fields(directory / "config.json", {}).wrong("image_token_index", text)
    return form
