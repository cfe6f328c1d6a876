"""Gives a GGUF file the form of a checkpoint directory: configuration files made from its metadata, and a link to it.

Directories are made once for each file's state, in the user's cache folder, so that every process of a service reads
the same ones. A changed file gets another directory.
"""

import contextlib
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from sluice_server.engine import models
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.fields import Json, invalid_model
from sluice_server.services.checkpoint.digests import FileKey, changed, remembered
from sluice_server.services.checkpoint.gguf.dumping import dump

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_KEPT = 64  # directories; one of Gemma's takes 40 MiB


def open_folder(path: Path) -> Path:
    """Returns the checkpoint directory of a GGUF file, or of the file with the first shard; makes it if need be.

    Raises ServiceError naming what is wrong with the file, or why the directory cannot be written.
    """
    files = shards_of(path)
    keys = [FileKey.of(file.stat()) for file in files]
    base = _base()
    folder = base / blake3(_sources() + repr((files, keys)).encode()).hexdigest()[:32]
    if folder.is_dir():
        with contextlib.suppress(OSError):
            os.utime(folder)
        return folder
    # Imported here: the other processes of a service find the directory, and most services serve no GGUF file.
    from sluice_server.engine.models.gguf.reader import read_header
    from sluice_server.services.checkpoint.gguf.configuration import make_configuration

    configuration = make_configuration(read_header(files[0]))
    if [FileKey.of(file.stat()) for file in files] != keys:
        raise changed(path)
    if len(files) == 1:
        links = {"model.gguf": files[0]}
    else:
        links = {f"model-{i:05}-of-{len(files):05}.gguf": file for i, file in enumerate(files, 1)}
    try:
        _write(folder, configuration, links)
        _trim(base)
    except OSError as error:
        text = f"{base} cannot be written to ({error.strerror}): set XDG_CACHE_HOME, or use sluice import-gguf"
        raise _unusable(path, text) from error
    return folder


def shards_of(path: Path) -> Sequence[Path]:
    """Returns all shards of a file that is named as the first one, else the file alone. Raises ServiceError."""
    path = path.absolute()
    match = SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if number != 1:
        raise invalid_model(path, f"is shard {number}; give the first one, {stem}-00001-of-{match[3]}.gguf")
    files = [path.with_name(f"{stem}-{i:05}-of-{match[3]}.gguf") for i in range(1, min(count, 1000) + 1)]
    for file in files:
        if not file.is_file():
            raise invalid_model(file, f"is missing; there are {count} shards: download the checkpoint again")
    return files


def _write(folder: Path, configuration: dict[str, dict[str, Json]], links: dict[str, Path]) -> None:
    """Writes a directory as a whole: another process may be writing the same one."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
    try:
        dump(part, configuration)
        for name, file in links.items():
            (part / name).symlink_to(file)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _trim(base: Path) -> None:
    """Removes the directories that were used least recently, above `MAX_KEPT`."""
    found = sorted((one for one in base.iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime)
    for one in found[: max(0, len(found) - MAX_KEPT)]:
        shutil.rmtree(one, ignore_errors=True)


def _base() -> Path:
    folder = remembered().folder
    if folder is None:
        text = "there is no home directory to keep its configuration in: set XDG_CACHE_HOME, or use sluice import-gguf"
        raise ServiceError(Code.FAILED_PRECONDITION, "MODEL_INVALID", f"GGUF: {text}", field="model")
    return folder.parent / "gguf"


@functools.cache
def _sources() -> bytes:
    """Returns a digest of the code that makes the files: another release may make others."""
    state = blake3()
    for folder in (Path(__file__).parent, Path(models.__file__).parent / "gguf"):
        for path in sorted(folder.glob("*.py")):
            state.update(path.read_bytes())
    return state.digest()


def _unusable(path: Path, text: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "MODEL_INVALID", f"{path}: {text}", field="model")
