"""Fetches adapters from repositories of the hub that an operator allows: two files of one commit, never a pickle.

The files lie in the hub's cache, where those of a commit are found again without the network. Sizes are asked for
before anything is downloaded.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from sluice_server.engine.adapters.config import invalid_adapter
from sluice_server.engine.adapters.sources import AdapterFolder
from sluice_server.engine.errors import Code, ServiceError

PART = r"[A-Za-z0-9][\w.-]{0,95}"
PATH = re.compile(rf"(?P<repository>{PART}/{PART})(@(?P<revision>{PART}))?")
ALLOWED = re.compile(rf"{PART}/({PART}|\*)")
COMMIT = re.compile(r"[0-9a-f]{40}")


def allowed_of(setting: str) -> tuple[str, ...]:
    """Returns the patterns of `--adapter-hub`. Raises ValueError naming one that is no repository and no ORG/*."""
    found = tuple(one.strip() for one in setting.split(",") if one.strip())
    for one in found:
        if not ALLOWED.fullmatch(one):
            raise ValueError(one)
    return found


class AdapterHub:
    """The repositories of which adapters may be fetched."""

    def __init__(self, setting: str) -> None:
        """`setting`: of `--adapter-hub`."""
        self._allowed = allowed_of(setting)

    def fetch(self, path: str, limits: Mapping[str, int]) -> AdapterFolder | None:
        """Returns the folder of `ORG/NAME`, or `ORG/NAME@REVISION`, with the files that `limits` names and their most
        bytes; None for any other path, and for a repository that is not allowed.

        Raises ServiceError ADAPTER_NOT_FOUND for what the hub does not give, ADAPTER_INVALID for a file that is too
        large or missing.
        """
        match = PATH.fullmatch(path)
        if match is None or not any(fnmatchcase(match["repository"], one) for one in self._allowed):
            return None
        repository, revision = match["repository"], match["revision"] or "main"
        if COMMIT.fullmatch(revision):
            found = _cached(repository, revision, limits)
            if found is not None:
                return found
        return _download(repository, revision, limits)


def _cached(repository: str, revision: str, limits: Mapping[str, int]) -> AdapterFolder | None:
    """Returns what the hub's cache has of a revision; None unless all files are there."""
    from huggingface_hub import hf_hub_download  # few engines need it, and the import takes time
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        files = [Path(hf_hub_download(repository, one, revision=revision, local_files_only=True)) for one in limits]
    except LocalEntryNotFoundError:
        return None
    return _folder(repository, files[0])


def _download(repository: str, revision: str, limits: Mapping[str, int]) -> AdapterFolder:
    import httpx2
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    commit = revision
    for name, limit in limits.items():
        try:
            said = hf_hub_download(repository, name, revision=commit, dry_run=True)
            if said.file_size is None or said.file_size > limit:
                text = f"{repository}: {name} has {said.file_size} bytes; an adapter of this base has at most {limit}"
                raise invalid_adapter(text)
            commit = said.commit_hash  # of the first file: the others are of the same one
            path = Path(hf_hub_download(repository, name, revision=commit))
        except LocalEntryNotFoundError as error:  # also an EntryNotFoundError: the hub cannot be reached
            found = _cached(repository, commit, limits)
            if found is None:
                raise _not_found(repository, error) from error
            return found
        except EntryNotFoundError as error:
            text = f"{repository} has no {name} at the hub: other files, pickles among them, are not read"
            raise invalid_adapter(text) from error
        except (HfHubHTTPError, httpx2.HTTPError, OSError) as error:
            raise _not_found(repository, error) from error
    return _folder(repository, path)


def _folder(repository: str, file: Path) -> AdapterFolder:
    """Returns a snapshot's folder by one of its files. Its root is the repository's part of the cache, as its files are
    links to blobs there."""
    snapshot = file.parent
    root = snapshot.parent.parent
    return AdapterFolder(root, str(snapshot.relative_to(root)), f"{repository}@{snapshot.name}")


def _not_found(repository: str, error: Exception) -> ServiceError:
    text = f"adapter: {repository} was not found: the hub gave {type(error).__name__}; check the id and the network"
    return ServiceError(Code.NOT_FOUND, "ADAPTER_NOT_FOUND", text, field="adapter")
