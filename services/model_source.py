"""Finds a model's directory: a path, a Hugging Face hub id, or the embedded demo model. Reads no weights."""

import dataclasses
import hashlib
import re
from importlib import resources
from pathlib import Path

from engine.errors import Code, ServiceError

DEMO = "demo"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Attributes:
    name: what clients ask for, if nothing else was set.
    revision: names the weights: a hub commit, or a digest of the directory's config and file sizes.
    """

    directory: Path
    name: str
    revision: str


def resolve_model(model: str, revision: str) -> ModelSource:
    """`revision` is what to fetch from a hub, or what to call a directory's, instead of a digest.

    Raises ServiceError NOT_FOUND saying what was tried and what to do.
    """
    if model == DEMO:
        directory = Path(str(resources.files("demo"))) / "target"
        return ModelSource(directory, DEMO, revision or digest(directory))
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(path.resolve(), path.resolve().name, revision or digest(path))
    if path.exists():
        raise _not_found(f"--model {model} is a file; give the checkpoint's directory")
    if not HUB_ID.fullmatch(model):
        raise _not_found(f"--model {model}: no such directory; give a directory, a hub id (org/name), or demo")
    return _from_hub(model, revision)


def resolve_draft(model: str, kind: str) -> Path:
    """The directory of what drafts, for speculation of a `kind`. Raises ServiceError as `resolve_model` does."""
    if model == DEMO:
        return Path(str(resources.files("demo"))) / {"draft": "draft", "eagle": "head"}[kind]
    try:
        return resolve_model(model, "").directory
    except ServiceError as error:
        raise _not_found(error.message.replace("--model", "--draft-model", 1)) from error


def digest(directory: Path) -> str:
    """12 hex digits over config.json and the names and sizes of the directory's files."""
    state = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.is_file():
            state.update(f"{path.name}\0{path.stat().st_size}\0".encode())
    config = directory / "config.json"
    if config.is_file():
        state.update(config.read_bytes())
    return state.hexdigest()[:12]


def _from_hub(model: str, revision: str) -> ModelSource:
    # Imported here: most starts need no hub, and this costs time.
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(model, revision=revision or None, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx2.HTTPError, OSError) as error:
        raise _not_found(
            f"--model {model}: no such directory here, and the hub gave {type(error).__name__}; check the id and the "
            "network, or download the checkpoint elsewhere and give its directory"
        ) from error
    return ModelSource(found, model, found.name)


def _not_found(message: str) -> ServiceError:
    return ServiceError(Code.NOT_FOUND, "MODEL_NOT_FOUND", message, field="model")
