"""Reads how a checkpoint's vectors are made, from sentence-transformers' files: modules.json and 1_Pooling/config.json;
and the text that they put before queries.

They are data: nothing that they name is imported. A checkpoint without them pools the last token, or the mean if it is
an encoder, and normalises.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from sluice_server.engine.models.encoders.reading import SENTENCES
from sluice_server.engine.models.fields import Fields, read_json, shown
from sluice_server.engine.models.word_labels import MODULES, kind_of, read_module, read_modules
from sluice_server.engine.request import Pooling

SETTINGS = "config_sentence_transformers.json"
_PREFIX = "pooling_mode_"
_MODES = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN, "mean_tokens": Pooling.MEAN}
_OF_ENCODERS = {**_MODES, "cls": Pooling.FIRST, "cls_token": Pooling.FIRST}


@dataclasses.dataclass(frozen=True, slots=True)
class PoolingFiles:
    """How a checkpoint says that its vectors are made.

    Attributes:
        pooling: how hidden states are pooled.
        normalize: whether vectors are scaled to length 1.
        pools_instruction: whether a mean counts the tokens of an instruction.
        refusal: why this server makes no vectors as the files say; empty if it does.
    """

    pooling: Pooling = Pooling.LAST
    normalize: bool = True
    pools_instruction: bool = True
    refusal: str = ""


def read_pooling(directory: Path, *, is_encoder: bool = False) -> PoolingFiles:
    """Reads a checkpoint directory. Raises ServiceError MODEL_INVALID naming file and field."""
    if is_encoder and _lowers(directory):
        return PoolingFiles(refusal=f"{SENTENCES} sets do_lower_case, which is not built")
    modules = read_modules(directory)
    if not os.path.lexists(directory / MODULES):
        return PoolingFiles(Pooling.MEAN if is_encoder else Pooling.LAST)
    found = PoolingFiles(refusal=f"{MODULES} names no module that pools")
    for module in modules:
        kind = kind_of(module)
        if kind == "Pooling":
            found = _read_mode(directory, module, _OF_ENCODERS if is_encoder else _MODES)
        elif kind == "Normalize":
            found = dataclasses.replace(found, normalize=True)
        elif kind != "Transformer":
            return PoolingFiles(refusal=f"{MODULES} names a module of type {shown(kind)}")
    return found


def read_instruction(directory: Path) -> str:
    """Returns the prompt that a checkpoint puts before every query unless another is named; "" if it has none. Raises
    ServiceError MODEL_INVALID naming file and field."""
    path = directory / SETTINGS
    fields = Fields(path, read_json(path) if os.path.lexists(path) else {})
    name = fields.string("default_prompt_name", "")
    return fields.within("prompts").string(name, "") if name else ""


def _lowers(directory: Path) -> bool:
    """Returns whether sentence-transformers turns capitals into small letters before the tokenizer sees them."""
    path = directory / SENTENCES
    return os.path.lexists(path) and Fields(path, read_json(path)).boolean("do_lower_case", False)


def _read_mode(directory: Path, module: Fields, known: Mapping[str, Pooling]) -> PoolingFiles:
    """Reads the configuration of a module that pools in one of the `known` ways."""
    fields = read_module(directory, module, "1_Pooling")
    flags = [key for key in fields.values if key.startswith(_PREFIX) and fields.boolean(key, False)]
    modes = [key.removeprefix(_PREFIX) for key in flags] or [fields.string("pooling_mode", "no mode")]
    if len(modes) > 1 or modes[0] not in known:
        return PoolingFiles(refusal=f"{fields.path.parent.name}/config.json pools by {shown(' and '.join(modes))}")
    return PoolingFiles(known[modes[0]], normalize=False, pools_instruction=fields.boolean("include_prompt", True))
