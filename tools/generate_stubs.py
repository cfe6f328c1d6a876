"""Generate the Python stubs of the contract into the Python SDK, or check that they are up to date.

`python -m tools.generate_stubs` writes, `--check` compares and exits 1 on a difference. Needs the `dev` extra. The
folder layout makes `sluice/v1/x.proto` importable as `sluice.v1.x_pb2`, so nothing generated is ever edited.
"""

import argparse
import importlib.resources
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "clients" / "python" / "src"
PACKAGE = Path("sluice") / "v1"
INIT = '"""Generated stubs of the contract `sluice.v1`. Written by tools/generate_stubs.py, never by hand."""\n'


def main() -> int:
    """Write the stubs, or with --check compare them; 0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 on a difference")
    arguments = parser.parse_args()
    fresh = generate()
    stale = different(fresh, TARGET)
    if arguments.check:
        for name in stale:
            print(f"{name} is out of date: run python -m tools.generate_stubs", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        write(TARGET / name, fresh.get(name))
    print(f"{len(fresh)} files, {len(stale)} changed")
    return 0


def generate() -> dict[str, bytes]:
    """Contents of all generated files, by path below the source folder of the SDK."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        status = protoc.main(["protoc", *options(folder), *sources])
        if status:
            raise SystemExit(f"protoc ended with status {status}")
        made = {path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*.py*")}
    return made | {(PACKAGE / "__init__.py").as_posix(): INIT.encode()}


def options(folder: str) -> list[str]:
    """Arguments of protoc that send all four kinds of stubs to `folder`."""
    scripts = Path(sysconfig.get_path("scripts"))
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--{kind}_out={folder}" for kind in ("python", "grpc_python")]
    quiet = [f"--{kind}_out=quiet:{folder}" for kind in ("mypy", "mypy_grpc")]
    includes = [f"-I{PROTOS}", f"-I{importlib.resources.files('grpc_tools') / '_proto'}"]
    return [*includes, *plugins, *outputs, *quiet]


def different(fresh: dict[str, bytes], target: Path) -> list[str]:
    """Names of files below `target` that are missing, differ from `fresh`, or should not exist."""
    folder = target / PACKAGE
    present = {
        path.relative_to(target).as_posix(): path.read_bytes() for path in folder.glob("*.py*") if path.is_file()
    }
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def write(path: Path, content: bytes | None) -> None:
    """Write `content`, or remove the file when there is none."""
    if content is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
