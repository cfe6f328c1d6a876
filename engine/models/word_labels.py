"""The classes of a checkpoint that answers with one of two words of its vocabulary, such as yes and no.

sentence-transformers' modules.json names a module LogitScore for it, whose file has the ids of both words. Such a model
is a head of one class: its weight is the difference of the two rows of the head for logits, and the sigmoid of its
number is the softmax over the two logits. Depends on the standard library only.
"""

import os
from pathlib import Path

from sluice_server.engine.models.fields import MENDING, Fields, invalid_model, read_any_json, read_json
from sluice_server.engine.models.labels import Activation, LabelsConfig

MODULES = "modules.json"
CLASS = "relevant"
_KIND = "LogitScore"


def read_modules(directory: Path) -> list[Fields]:
    """Returns the modules of sentence-transformers' modules.json; none without that file. Raises ServiceError
    MODEL_INVALID."""
    path = directory / MODULES
    if not os.path.lexists(path):
        return []
    listed = read_any_json(path)
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise invalid_model(path, f"does not hold a list of objects: {MENDING}")
    return [Fields(path, one) for one in listed if isinstance(one, dict)]


def kind_of(module: Fields) -> str:
    """Returns the last part of a module's class."""
    return module.string("type", "no type").rpartition(".")[2]


def read_module(directory: Path, module: Fields, default: str) -> Fields:
    """Reads a module's config.json; its folder must be one of the checkpoint's. Raises ServiceError MODEL_INVALID."""
    name = module.string("path", default)
    if Path(name).name != name:
        raise module.must_be("path", "a folder beside the file")
    path = directory / name / "config.json"
    return Fields(path, read_json(path))


def read_words(directory: Path, vocab_size: int) -> LabelsConfig | None:
    """Returns the class of a checkpoint that answers with one of two words; None for others, also for a score of one.

    Raises ServiceError MODEL_INVALID naming file and field.
    """
    for module in read_modules(directory):
        if kind_of(module) == _KIND:
            fields = read_module(directory, module, f"1_{_KIND}")
            if fields.values.get("false_token_id") is None:
                return None
            words = _word(fields, "true_token_id", vocab_size), _word(fields, "false_token_id", vocab_size)
            return LabelsConfig((CLASS,), Activation.SIGMOID, words)
    return None


def _word(fields: Fields, name: str, vocab_size: int) -> int:
    value = fields.values.get(name)
    if type(value) is not int or not 0 <= value < vocab_size:
        raise fields.must_be(name, f"an id from 0 to {vocab_size - 1}, below vocab_size")
    return value
