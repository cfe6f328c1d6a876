"""The training text of the demo model: the Python source of the standard library, a tenth of it held out.

In: the standard library's folder. Out: files in a fixed order, split by a hash of their relative path. Independent of
    tokens and models.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Tests and generated tables are poor training data, and many distributions leave them out.
LEFT_OUT_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "_bundled",
        "encodings",  # character maps: tables of numbers
        "pydoc_data",  # one generated file of quoted manual text
    }
)
# Written when an interpreter is built: paths and flags that differ on every machine.
LEFT_OUT_PREFIXES = ("_sysconfigdata", "config-")
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Document:
    path: str  # relative to the standard library, with forward slashes
    text: str


@dataclass(frozen=True)
class Corpus:
    train: tuple[Document, ...]  # sorted by path
    held_out: tuple[Document, ...]  # sorted by path; about a tenth of the files


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def collect(root: Path) -> Corpus:
    """Read and split every source file under `root`. The order of files on disk does not matter."""
    documents = [Document(name, read(root / name)) for name in sorted(source_names(root))]
    kept = [document for document in documents if document.text.strip()]
    return Corpus(
        train=tuple(document for document in kept if not is_held_out(document.path)),
        held_out=tuple(document for document in kept if is_held_out(document.path)),
    )


def is_held_out(path: str) -> bool:
    """Whether a file is held out. Decided by its path alone, so that other files and changes do not move it."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def source_names(root: Path) -> list[str]:
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return [path.as_posix() for path in paths if is_source(path)]


def is_source(path: Path) -> bool:
    if LEFT_OUT_FOLDERS.intersection(path.parts[:-1]):
        return False
    return not any(part.startswith(LEFT_OUT_PREFIXES) for part in path.parts)


def read(path: Path) -> str:
    # A few files of the standard library are Latin-1 on purpose; replacement characters there do no harm.
    return path.read_text(encoding="utf-8", errors="replace")


def num_bytes(documents: tuple[Document, ...]) -> int:
    return sum(len(document.text.encode()) for document in documents)
