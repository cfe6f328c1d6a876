"""What requests about models ask for, checked. Pure, except for the look for a directory."""

from collections.abc import Callable
from pathlib import Path

from sluice.v1 import control_pb2

from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.services.process.model_table import Options
from sluice_server.services.process.models_file import MAX_ID_BYTES, NamedModel, parsed_option

MAX_SOURCE_BYTES = 1024
MAX_SETTINGS, MAX_SETTING_BYTES = 64, 1024
MAX_TARGETS, MAX_WEIGHT = 16, 10_000
MAX_REVISION_BYTES = 128


def named_model(
    request: control_pb2.LoadModelRequest, models_dir: str, declared: Callable[[str], NamedModel | None]
) -> NamedModel:
    """Returns the model that is to be loaded. `declared`: what the file of models says of an id. Raises
    ServiceError."""
    check_name("model", request.model)
    known = declared(request.model)
    for field in ("revision", "expected_revision"):
        _check_size(field, getattr(request, field), MAX_REVISION_BYTES, least=0)
    if known is not None and not request.HasField("source"):
        source, revision, options = known.source, known.revision, known.options
    else:
        source, revision, options = _below(request, models_dir), "", {}
    own = _settings(request)
    return NamedModel(
        id=request.model,
        source=source,
        revision=request.revision if request.HasField("revision") else revision,
        pinned=request.pinned if request.HasField("pinned") else known is not None and known.pinned,
        options={**options, **own},
    )


def weights_of(request: control_pb2.SetAliasRequest) -> dict[str, int]:
    """Returns the weights of an alias's models, without those of 0. Raises ServiceError."""
    check_name("alias", request.alias)
    if len(request.targets) > MAX_TARGETS:
        raise invalid("targets", f"has {len(request.targets)} models; {MAX_TARGETS} are allowed", limit=MAX_TARGETS)
    weights: dict[str, int] = {}
    for at, target in enumerate(request.targets):
        check_name(f"targets[{at}].model", target.model)
        weight = target.weight if target.HasField("weight") else 1
        if weight > MAX_WEIGHT:
            raise invalid(f"targets[{at}].weight", f"{weight} is above {MAX_WEIGHT}", limit=MAX_WEIGHT)
        if target.model in weights:
            raise invalid(f"targets[{at}].model", f"{target.model[:64]!r} is there twice")
        weights[target.model] = weight
    if weights and not sum(weights.values()):
        raise invalid("targets", "the weights are all 0: give one of the models a weight, or name no target")
    return {model: weight for model, weight in weights.items() if weight}


def check_name(field: str, name: str) -> None:
    """Raises ServiceError for a name that no model and no alias can have."""
    _check_size(field, name, MAX_ID_BYTES)
    if ":" in name or not name.isprintable() or name.strip() != name:
        text = f"{name[:64]!r} has a colon, a blank at an end or a character that cannot be printed: use another name"
        raise invalid(field, text)


def _below(request: control_pb2.LoadModelRequest, models_dir: str) -> str:
    """Returns a path below the directory of models. Raises ServiceError for one that leads elsewhere."""
    field = "source" if request.HasField("source") else "model"
    given = request.source if field == "source" else request.model
    _check_size(field, given, MAX_SOURCE_BYTES)
    if not models_dir:
        text = f"{field}: {given[:64]!r} is not in the server's file of models, and the server has no --models-dir"
        raise ServiceError(Code.NOT_FOUND, "MODEL_NOT_FOUND", f"{text}: start it with one", field=field)
    root = Path(models_dir).resolve()
    path = (root / given).resolve()
    if not path.is_relative_to(root) or path == root or not path.exists():
        text = (
            f"{field}: there is no {given[:64]!r} below the server's --models-dir, or it is a link that leads elsewhere"
        )
        raise ServiceError(Code.NOT_FOUND, "MODEL_NOT_FOUND", text, field=field)
    return str(path)


def _settings(request: control_pb2.LoadModelRequest) -> Options:
    if len(request.settings) > MAX_SETTINGS:
        raise invalid("settings", f"has {len(request.settings)} entries; {MAX_SETTINGS} are allowed")
    found: Options = {}
    for name, text in request.settings.items():
        _check_size("settings", name, MAX_SETTING_BYTES)
        _check_size("settings", text, MAX_SETTING_BYTES, least=0)
        try:
            key, value = parsed_option(name, text)
        except ServiceError as error:
            raise invalid("settings", error.message) from None
        found[key] = value
    return found


def _check_size(field: str, text: str, most: int, least: int = 1) -> None:
    size = len(text.encode())
    if not least <= size <= most:
        raise invalid(field, f"has {size} bytes; {least} to {most} are allowed", limit=most)
