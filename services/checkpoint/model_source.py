"""Finds a model's directory (a path, a Hugging Face hub id, or the embedded demo model) and names what lies there.

The name is of the content, read once and remembered (`services.checkpoint.digests`); of the hub's own snapshots it is
the commit.
"""

import dataclasses
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.checkpoint.digests import FileKey, Remembered, changed, digest_of
from sluice_server.services.checkpoint.revisions import whole

DEMO = "demo"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")
LABEL = re.compile(r"[\w.+-]{0,64}")
WEIGHTS = ("*.safetensors",)
CONFIGURATION = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "tokenizer.model")
HUB_FILES = [*WEIGHTS, *CONFIGURATION]
SHOWN = 12  # hex digits of a digest in a revision


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Attributes:
    path: where its files are, as it was given: may be a link that is turned to another directory later.
    name: what clients ask for, if nothing else was set.
    label: stands before a digest in its revision; what the operator calls it.
    """

    path: Path
    name: str
    label: str = ""

    @property
    def directory(self) -> Path:
        """Where its files are now."""
        return self.path.resolve()


class CheckpointName(NamedTuple):
    """The whole revision of a checkpoint, and what names its content to every bit."""

    revision: str
    digest: bytes


class CheckpointFiles:
    """Files of a checkpoint as they are when this is made: a process makes it, reads the files, and then checks that
    they are still the same.

    Attributes:
        path: of the checkpoint, as it was given.
        directory: that they are read from.
        configuration: the revision of all but the weights; see `services.checkpoint.revisions`.
    """

    def __init__(self, source: ModelSource, memory: Remembered, *, with_weights: bool = False) -> None:
        """Reads the configuration, no weights."""
        self.path = source.path
        self.directory = source.directory
        self._memory = memory
        self._patterns = (*CONFIGURATION, *(WEIGHTS if with_weights else ()))
        self._files = self._look()
        self._commit = commit_of(self.directory)
        self._configuration = b"" if self._commit else self._digest(CONFIGURATION)
        named = self._commit or self._configuration.hex()[:SHOWN]
        self.configuration = f"{source.label}+{named}" if source.label else named

    def named(self) -> CheckpointName:
        """What names all files. Reads the weights, or what is remembered of them, which may take long. Raises
        ServiceError MODEL_CHANGED."""
        if self._commit:
            return CheckpointName(self.configuration, self._commit.encode())
        weights = self._digest(WEIGHTS)
        return CheckpointName(whole(self.configuration, weights.hex()[:SHOWN]), self._configuration + weights)

    def is_changed(self) -> bool:
        """Whether other files are there now."""
        return self._look() != self._files

    def check(self) -> None:
        """Raise ServiceError MODEL_CHANGED if other files are there now."""
        if self.is_changed():
            raise changed(self.path)

    def _look(self) -> dict[str, FileKey]:
        directory = self.path.resolve()
        try:
            return {_name(path, directory): FileKey.of(path.stat()) for path in _matching(directory, self._patterns)}
        except OSError as error:
            raise changed(directory) from error

    def _digest(self, patterns: Iterable[str]) -> bytes:
        """Over names and contents."""
        state = blake3()
        for path in _matching(self.directory, patterns):
            name = _name(path, self.directory)
            if name not in self._files:
                raise changed(path)
            state.update(name.encode() + b"\0" + digest_of(path, self._files[name], self._memory))
        return state.digest()


def resolve_model(model: str, revision: str) -> ModelSource:
    """`revision` is what to fetch from a hub, or what a directory's revision is to begin with.

    Raises ServiceError NOT_FOUND saying what was tried and what to do.
    """
    if model == DEMO:
        return ModelSource(Path(str(resources.files("sluice_server.demo"))) / "target", DEMO, _label(revision))
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(path.absolute(), path.resolve().name, _label(revision))
    if path.exists():
        raise _not_found(f"--model {model} is a file; give the checkpoint's directory")
    if not HUB_ID.fullmatch(model):
        raise _not_found(f"--model {model}: no such directory; give a directory, a hub id (org/name), or demo")
    return _from_hub(model, revision)


def resolve_draft(model: str, kind: str) -> ModelSource:
    """What drafts, for speculation of a `kind`. Raises ServiceError as `resolve_model` does."""
    if model == DEMO:
        return ModelSource(
            Path(str(resources.files("sluice_server.demo"))) / {"draft": "draft", "eagle": "head"}[kind], DEMO
        )
    try:
        return resolve_model(model, "")
    except ServiceError as error:
        raise _not_found(error.message.replace("--model", "--draft-model", 1)) from error


def commit_of(directory: Path) -> str:
    """The commit whose snapshot of the hub's own cache a directory is, "" for any other: its files are links to blobs,
    which are named by what they hold."""
    is_snapshot = directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--")
    if not is_snapshot or not COMMIT.fullmatch(directory.name):
        return ""
    return directory.name if all(path.is_symlink() for path in _matching(directory, HUB_FILES)) else ""


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    """Files of these names, in order; none that are hidden, as those are that are being written."""
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _name(path: Path, directory: Path) -> str:
    return path.relative_to(directory).as_posix()


def _label(revision: str) -> str:
    if not LABEL.fullmatch(revision):
        text = f"--revision: {revision!r} is not of at most 64 letters, digits and _ . + -"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="revision")
    return revision


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
    return ModelSource(found, model)


def _not_found(message: str) -> ServiceError:
    return ServiceError(Code.NOT_FOUND, "MODEL_NOT_FOUND", message, field="model")
