"""Finds a model's files (a path, a Hugging Face hub id, or the embedded demo model) and names their contents.

The name is a digest of the contents, computed once and cached (`services.checkpoint.digests`); for a snapshot in the
hub's cache it is the commit.
"""

import dataclasses
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.fields import unreadable
from sluice_server.services.checkpoint.digests import FileKey, Remembered, changed, digest_of
from sluice_server.services.checkpoint.gguf.choice import DEFAULT_TAG, choose_file, patterns_of, stem_of
from sluice_server.services.checkpoint.gguf.folder import open_folder
from sluice_server.services.checkpoint.packaged import HOW, SMOLLM2, smollm2_file
from sluice_server.services.checkpoint.revisions import whole

DEMO = "demo"
HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<tag>[\w.-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
LABEL = re.compile(r"[\w.+-]{0,64}")
WEIGHTS = ("*.safetensors", "model*.gguf")
CONFIGURATION = (
    *("*.json", "*.jinja", "additional_chat_templates/*.jinja", "tokenizer.model"),
    *("*_Pooling/config.json", "*_LogitScore/config.json"),
)
HUB_FILES = ["*.safetensors", *CONFIGURATION]
SHOWN = 12  # hex digits of a digest that a revision shows


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are, and its names.

    Attributes:
        path: the directory or the GGUF file as given; may be a link that is changed to another one later.
        name: the model name for clients, unless another is configured.
        label: the operator's prefix of the revision, before the digest.
    """

    path: Path
    name: str
    label: str = ""

    @property
    def directory(self) -> Path:
        """The directory that `path` leads to now."""
        return directory_of(self.path)


class CheckpointName(NamedTuple):
    """The whole revision of a checkpoint, and the digest of its entire content."""

    revision: str
    digest: bytes


class CheckpointFiles:
    """The files of a checkpoint at the time of construction, to be compared after a process has read them.

    Attributes:
        path: the checkpoint's path as given.
        directory: the directory that the files are read from.
        configuration: the revision of all files but the weights; see `services.checkpoint.revisions`.
    """

    def __init__(self, source: ModelSource, memory: Remembered, *, with_weights: bool = False) -> None:
        """Reads the configuration files, not the weights."""
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
        """Returns the name of all files. Reads the weights unless their digests are cached, which may take long.

        Raises ServiceError MODEL_CHANGED.
        """
        if self._commit:
            return CheckpointName(self.configuration, self._commit.encode())
        weights = self._digest(WEIGHTS)
        return CheckpointName(whole(self.configuration, weights.hex()[:SHOWN]), self._configuration + weights)

    def is_changed(self) -> bool:
        """Returns True if the files have changed since construction."""
        return self._look() != self._files

    @property
    def written_s(self) -> int:
        """When the newest of the files was written, in seconds since 1970; 0 without files."""
        return max((one.mtime_ns for one in self._files.values()), default=0) // 10**9

    def check(self) -> None:
        """Raises ServiceError MODEL_CHANGED if the files have changed since construction."""
        if self.is_changed():
            raise changed(self.path)

    def _look(self) -> dict[str, FileKey]:
        try:
            directory = directory_of(self.path)
            return {_name(path, directory): FileKey.of(path.stat()) for path in _matching(directory, self._patterns)}
        except OSError as error:
            raise changed(self.path) from error

    def _digest(self, patterns: Iterable[str]) -> bytes:
        """Hashes names and contents of the files."""
        state = blake3()
        for path in _matching(self.directory, patterns):
            name = _name(path, self.directory)
            if name not in self._files:
                raise changed(path)
            state.update(name.encode() + b"\0" + digest_of(path, self._files[name], self._memory))
        return state.digest()


def directory_of(path: Path) -> Path:
    """Returns the directory with a model's files: for a GGUF file the one that is made for it."""
    return open_folder(path) if path.is_file() else path.resolve()


def resolve_model(model: str, revision: str) -> ModelSource:
    """Finds a model. `revision` is the hub's revision to fetch, or for other models the label of its revision.

    Raises ServiceError NOT_FOUND saying what was tried and what to do.
    """
    if model == DEMO:
        return ModelSource(Path(str(resources.files("sluice_server.demo"))) / "target", DEMO, _label(revision))
    if not model:  # as a path it would be the directory that the process runs in
        raise _unknown(model)
    path = Path(model).expanduser()
    try:
        path.stat()
    except PermissionError as error:  # of a directory above it
        raise unreadable(path, error) from error
    except (OSError, ValueError):  # ValueError: a name that no file can have
        pass
    if path.is_dir():
        is_gguf = not any(path.glob("*.safetensors")) and any(path.glob("*.gguf"))
        found = choose_file(path, "", f"--model {model}") if is_gguf else path
        return ModelSource(found.absolute(), path.resolve().name, _label(revision))
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(path.absolute(), stem_of(path), _label(revision))
    if path.exists():
        raise _not_found(f"--model {model} is a file; give the checkpoint's directory, or a GGUF file (*.gguf)")
    if model == SMOLLM2:
        return _packaged(revision)
    match = HUB_ID.fullmatch(model)
    if match is None:
        raise _unknown(model)
    return _from_hub(model, match["repository"], match["tag"] or "", revision)


def is_on_hub(model: str) -> bool:
    """Whether `resolve_model` would ask the hub or its cache for a model."""
    return model not in (DEMO, SMOLLM2) and not Path(model).expanduser().exists()


def resolve_draft(model: str, kind: str) -> ModelSource:
    """Finds the draft model or head for speculation of a `kind`. Raises ServiceError as `resolve_model` does."""
    if model == DEMO:
        return ModelSource(
            Path(str(resources.files("sluice_server.demo"))) / {"draft": "draft", "eagle": "head"}[kind], DEMO
        )
    try:
        return resolve_model(model, "")
    except ServiceError as error:
        raise _not_found(error.message.replace("--model", "--draft-model", 1)) from error


def commit_of(directory: Path) -> str:
    """Returns the commit if a directory is a snapshot in the hub's cache, else "".

    The files of such a snapshot are links to blobs, which are named by their contents.
    """
    is_snapshot = directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--")
    if not is_snapshot or not COMMIT.fullmatch(directory.name):
        return ""
    return directory.name if all(path.is_symlink() for path in _matching(directory, HUB_FILES)) else ""


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    """Returns the files that match, sorted; without hidden files, which may be incomplete downloads."""
    found = {path for pattern in patterns for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _name(path: Path, directory: Path) -> str:
    return path.relative_to(directory).as_posix()


def _label(revision: str) -> str:
    if not LABEL.fullmatch(revision):
        text = f"--revision: {revision!r} is not of at most 64 letters, digits and _ . + -"
        raise ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", text, field="revision")
    return revision


def _packaged(revision: str) -> ModelSource:
    path = smollm2_file()
    if path is None:
        raise _not_found(f"--model {SMOLLM2} is in a package that is not installed: {HOW}")
    return ModelSource(path.absolute(), SMOLLM2, _label(revision))


def _from_hub(model: str, repository: str, tag: str, revision: str) -> ModelSource:
    """Downloads a model, or finds it in the hub's cache; `tag` names one of a repository's GGUF files."""
    if not tag:
        found = _download(model, repository, revision, HUB_FILES)
        if any(found.glob("*.safetensors")):
            return ModelSource(found, model)
        try:  # a repository of GGUF files, of which a quantisation is the usual one
            found = _download(model, repository, revision, patterns_of(DEFAULT_TAG))
            return ModelSource(choose_file(found, DEFAULT_TAG, f"--model {model}"), model)
        except ServiceError as error:
            text = f"{error.message}; a repository of GGUF files may have another, as in {repository}:Q8_0"
            raise _not_found(text) from error
    found = _download(model, repository, revision, patterns_of(tag))
    return ModelSource(choose_file(found, tag, f"--model {model}"), model)


def _download(model: str, repository: str, revision: str, patterns: list[str]) -> Path:
    # Imported here because most starts need no hub, and the import takes time.
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except HFValidationError:
        raise _unknown(model) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx2.HTTPError, OSError) as error:
        raise _not_found(
            f"--model {model}: no such directory here, and the hub gave {type(error).__name__}; check the id and the "
            "network, or download the checkpoint elsewhere and give its directory"
        ) from error


def _unknown(model: str) -> ServiceError:
    found = f"{model}: no such directory" if model else "is empty"
    return _not_found(f"--model {found}; give a directory, a GGUF file, a hub id (org/name), {SMOLLM2}, or {DEMO}")


def _not_found(message: str) -> ServiceError:
    return ServiceError(Code.NOT_FOUND, "MODEL_NOT_FOUND", message, field="model")
