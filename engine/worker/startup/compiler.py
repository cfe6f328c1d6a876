"""What Triton needs at its first launch: a C compiler, Python's headers, and a cache whose files may be executed.

Triton compiles a small module of C that launches kernels, and keeps it with the compiled kernels in its cache. Reads
the environment and the file system; imports no Triton.
"""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
MODULES = "*/*.so"  # in the cache: what was compiled of C


def missing(environment: Mapping[str, str] = os.environ, include: Path | None = None) -> str | None:
    """Returns what is missing and what to do; None if nothing is.

    `include`: the directory of Python's headers, by default that of this Python.
    """
    cache = cache_of(environment)
    if not os.access(existing(cache), os.W_OK | os.X_OK):
        return f"Triton's cache cannot be written in {cache}: set TRITON_CACHE_DIR to a directory that is kept"
    if os.statvfs(existing(cache)).f_flag & os.ST_NOEXEC:
        return f"Triton's cache {cache} is on a file system mounted noexec: set TRITON_CACHE_DIR to one that is not"
    if any(cache.glob(MODULES)):
        return None  # compiled before
    if not environment.get("CC") and not any(shutil.which(one, path=environment.get("PATH")) for one in COMPILERS):
        return f"Triton needs a C compiler at its first launch ({', '.join(COMPILERS)}, or CC): apt-get install gcc"
    headers = include or Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        return f"Triton needs Python's headers at its first launch, and {headers} has none: apt-get install python3-dev"
    return None


def cache_of(environment: Mapping[str, str]) -> Path:
    """Returns the directory of Triton's cache."""
    given = environment.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path(environment.get("HOME", "~")).expanduser() / ".triton" / "cache"


def existing(path: Path) -> Path:
    """Returns the path itself, or the nearest directory above it that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())
