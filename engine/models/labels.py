"""The classes of a checkpoint with a classification head, from config.json. Depends on the standard library only."""

import dataclasses
import enum
from typing import cast

from sluice_server.engine.errors import unsupported
from sluice_server.engine.models.fields import MENDING, Fields, shown

MOST = 1 << 16
DEFAULT = 2  # classes where a file names none


class Activation(enum.StrEnum):
    """What makes probabilities of the head's numbers."""

    NONE = "none"
    SIGMOID = "sigmoid"  # each by itself
    SOFTMAX = "softmax"  # all together


_ACTIVATIONS = {
    "regression": Activation.NONE,
    "multi_label_classification": Activation.SIGMOID,
    "single_label_classification": Activation.SOFTMAX,
}


_OF_TORCH = {"Identity": Activation.NONE, "Sigmoid": Activation.SIGMOID}


@dataclasses.dataclass(frozen=True, slots=True)
class LabelsConfig:
    """The classes of a classification head.

    Attributes:
        names: in the order of the head's rows.
        activation: makes scores of the head's numbers.
        words: ids of two words, the one for the class first, where the model answers with one; see `word_labels`.
    """

    names: tuple[str, ...]
    activation: Activation
    words: tuple[int, int] | None = None


def read_labels(raw: Fields) -> LabelsConfig:
    """Reads id2label, or num_labels, and problem_type. Raises ServiceError MODEL_INVALID naming the field."""
    names = _names(raw)
    kind = raw.values.get("problem_type")
    named = _cross_encoder(raw)
    if named is not None:
        return LabelsConfig(names, named)
    if kind is None:
        return LabelsConfig(names, Activation.SIGMOID if len(names) == 1 else Activation.SOFTMAX)
    activation = _ACTIVATIONS.get(str(kind))
    if activation is None:
        raise raw.must_be("problem_type", f"one of {', '.join(_ACTIVATIONS)}")
    return LabelsConfig(names, activation)


def _cross_encoder(raw: Fields) -> Activation | None:
    """Returns the activation that sentence-transformers applies; None where the file names none. It is named by a class
    of torch, which is not imported."""
    nested = raw.values.get("sentence_transformers")
    value = nested.get("activation_fn") if isinstance(nested, dict) else None
    value = raw.values.get("sbert_ce_default_activation_function") if value is None else value
    if value is None:
        return None
    found = _OF_TORCH.get(str(value).rpartition(".")[2])
    if found is None:
        raise unsupported("activation_fn", f"activation_fn {shown(value)} of a cross-encoder is not supported")
    return found


def _names(raw: Fields) -> tuple[str, ...]:
    if raw.values.get("id2label") is None:
        num = raw.values.get("num_labels", DEFAULT)
        if type(num) is not int or not 1 <= num <= MOST:
            raise raw.must_be("num_labels", f"a whole number from 1 to {MOST}")
        return tuple(f"LABEL_{at}" for at in range(num))
    found = raw.within("id2label").values
    names = [found.get(str(at)) for at in range(len(found))]
    if not 1 <= len(names) <= MOST or not all(isinstance(name, str) for name in names):
        raise raw.wrong("id2label", f"must name the classes 0 to n - 1, {MOST} at most: {MENDING}")
    return tuple(cast("list[str]", names))
