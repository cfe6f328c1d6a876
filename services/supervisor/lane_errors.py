"""The errors of commands about models."""

from collections.abc import Sequence

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.process.model_table import LaneEntry, LaneState


def unknown(model: str, served: Sequence[str] = ()) -> ServiceError:
    """NOT_FOUND for a model that the service does not have."""
    hint = f"the service has {', '.join(map(repr, served))}" if served else "see ListModels"
    return _error(Code.NOT_FOUND, "MODEL_NOT_FOUND", f"model {model[:128]!r} is not known here; {hint}")


def unknown_alias(alias: str) -> ServiceError:
    """NOT_FOUND for an alias that does not exist."""
    return _error(Code.NOT_FOUND, "MODEL_NOT_FOUND", f"alias {alias[:128]!r} is not known here; see ListModels")


def exists(model: str) -> ServiceError:
    """ALREADY_EXISTS for a model that has other files or settings."""
    text = f"the service has a model {model!r} of another source, revision or settings: give this one another id"
    return _error(Code.ALREADY_EXISTS, "MODEL_EXISTS", text)


def is_alias(name: str) -> ServiceError:
    """ALREADY_EXISTS for an id that is an alias."""
    return _error(Code.ALREADY_EXISTS, "MODEL_EXISTS", f"{name!r} is an alias: give the model another id")


def is_model(name: str) -> ServiceError:
    """ALREADY_EXISTS for an alias that is a model's id."""
    return _error(Code.ALREADY_EXISTS, "MODEL_EXISTS", f"{name!r} is the id of a model: use another alias")


def is_leaving(model: str) -> ServiceError:
    """FAILED_PRECONDITION for a model that is being unloaded."""
    return _in_use(f"the model {model!r} is being unloaded: try again when it is gone")


def is_named(model: str, aliases: Sequence[str]) -> ServiceError:
    """FAILED_PRECONDITION for the unloading of a model that aliases stand for."""
    return _in_use(f"the aliases {', '.join(aliases)} stand for the model {model!r}: set them to others first")


def is_default(name: str) -> ServiceError:
    """FAILED_PRECONDITION for the end of the default model."""
    return _in_use(f"{name!r} is the model of requests that name none: it stays while the service runs")


def is_fixed(model: str) -> ServiceError:
    """FAILED_PRECONDITION for the unloading of the model of --model."""
    text = f"the service was started with --model for {model!r}, which stays: start it with --models to unload models"
    return _in_use(text)


def too_many(limit: int) -> ServiceError:
    """RESOURCE_EXHAUSTED: as many models as may be."""
    text = f"the service has {limit} models, as many as it may: unload one first"
    return _error(Code.RESOURCE_EXHAUSTED, "TOO_MANY_MODELS", text)


def _in_use(text: str) -> ServiceError:
    return _error(Code.FAILED_PRECONDITION, "MODEL_IN_USE", text)


def _error(code: Code, reason: str, text: str) -> ServiceError:
    return ServiceError(code, reason, text, field="model")


def check_same(there: LaneEntry, wanted: LaneEntry) -> None:
    """Raises ServiceError unless a model that is to be loaded is there already, and stays."""
    if there.state is LaneState.DRAINING:
        raise is_leaving(there.model)
    if (there.source, there.revision, there.options) != (wanted.source, wanted.revision, wanted.options):
        raise exists(there.model)
