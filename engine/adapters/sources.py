"""Where adapters are read from: folders below one root, and repositories of a hub that a caller fetches.

A path names a folder below the root, or else a repository. Of what was fetched the path has the commit, so that any
engine reads the same files again.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from sluice_server.engine.adapters.config import invalid_adapter
from sluice_server.engine.models.fields import shown


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder with an adapter's files.

    Attributes:
        root: which no file of it may leave, also by a link.
        folder: below the root.
        path: that names the same files from now on.
    """

    root: Path
    folder: str
    path: str


# Takes a path and the most bytes of each file, and returns what was fetched; None for a path of nothing that may be
# fetched. Raises ServiceError. Called on a thread of its own.
Fetch: TypeAlias = Callable[[str, Mapping[str, int]], AdapterFolder | None]


def _nothing(path: str, limits: Mapping[str, int]) -> AdapterFolder | None:
    """The default of `fetch`."""
    return None


class AdapterSources:
    """The sources of one engine's adapters."""

    def __init__(self, root: Path | None) -> None:
        """`root`: the folder of adapters; None without one."""
        self.fetch: Fetch = _nothing
        self._root = root

    def is_local(self, path: str) -> bool:
        """Whether a path needs no fetching."""
        return self.fetch is _nothing or (self._root is not None and (self._root / path).is_dir())

    def local(self, path: str) -> AdapterFolder:
        """Returns the folder below the root that a path names. Raises ServiceError where there is no root."""
        if self._root is None:
            raise invalid_adapter(
                f"{shown(path)} is no repository that --adapter-hub allows, and --adapter-dir is not set"
            )
        return AdapterFolder(self._root, path, path)

    def fetched(self, path: str, limits: Mapping[str, int]) -> AdapterFolder:
        """Returns the folder that a path names, which is fetched if it may be. Takes long. Raises ServiceError."""
        return self.fetch(path, limits) or self.local(path)
