"""Finds the GGUF file that a folder's or a repository's name with a tag means: `org/name:Q4_K_M`."""

import re
from pathlib import Path

from sluice_server.engine.errors import Code, ServiceError

DEFAULT_TAG = "Q4_K_M"  # as llama.cpp's tools
LATER_SHARD = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
SHARD_SUFFIX = re.compile(r"-\d{5}-of-\d{5}$")
SHOWN = 8  # names in an error message


def patterns_of(tag: str) -> list[str]:
    """Returns glob patterns of the files that a tag names, in capitals or not: a file's name, or its end."""
    name = "".join(f"[{one.lower()}{one.upper()}]" if one.isalpha() else one for one in tag.removesuffix(".gguf"))
    return [f"{before}{name}{after}" for before in ("", "*[-._/]") for after in (".gguf", "-*-of-*.gguf")]


def choose_file(directory: Path, tag: str, what: str) -> Path:
    """Returns the file that a tag names, or without a tag the only file; of shards it is the first.

    Raises ServiceError NOT_FOUND listing the files; `what` is the setting.
    """
    found = [one for one in sorted(directory.rglob("*.gguf") if tag else directory.glob("*.gguf")) if _is_model(one)]
    fitting = [one for one in found if not tag or _fits(one, tag)]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(one.name for one in (fitting or found)[:SHOWN]) or "none"
    wanted = f"{len(fitting)} GGUF files fit" if tag else f"there are {len(fitting)} GGUF files"
    text = f"{what}: {wanted}; name one of: {names}"
    raise ServiceError(Code.NOT_FOUND, "MODEL_NOT_FOUND", text, field="model")


def stem_of(path: Path) -> str:
    """Returns the name of a file without its ending and shard."""
    return SHARD_SUFFIX.sub("", path.stem)


def _is_model(path: Path) -> bool:
    """Returns whether a file may be a model: no later shard, no part for images, no incomplete download."""
    return not (LATER_SHARD.fullmatch(path.name) or path.name.startswith((".", "mmproj")))


def _fits(path: Path, tag: str) -> bool:
    stem, wanted = stem_of(path).lower(), tag.removesuffix(".gguf").lower()
    return stem == wanted or any(stem.endswith(f"{before}{wanted}") for before in "-._")
