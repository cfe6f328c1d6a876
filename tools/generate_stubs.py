"""Generate the Python stubs of the contracts, or check that they are up to date.

`python -m tools.generate_stubs` writes, `--check` compares and exits 1 on a difference. Needs the `dev` extra. Stubs of
sluice.v1 go into the Python SDK, where the folder layout makes `sluice/v1/x.proto` importable as `sluice.v1.x_pb2`
without edits. Stubs of protocols of others, of which only messages are needed, go beside their adapters.
"""

import argparse
import dataclasses
import importlib.resources
import sys
import sysconfig
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
VLLM = "sluice_server/services/gateway/vllm/contract"  # as its stubs import each other


@dataclasses.dataclass(frozen=True, slots=True)
class Contract:
    """The location of a contract and of its stubs, relative to the root of the repository."""

    name: str
    protos: Path  # the folder of its files, or the root of its imports
    sources: str  # pattern of its files
    target: Path  # root of the generated packages
    package: Path  # below the target; holds generated files only
    has_clients: bool
    imported_as: str = ""  # the path of `protos` in imports, where its files import each other


CONTRACTS = (
    Contract("sluice.v1", PROTOS, "sluice/v1/*.proto", Path("clients/python/src"), Path("sluice/v1"), True),
    Contract(
        "inference", PROTOS / "inference", "*.proto", Path("services/gateway/oip/contract"), Path(), has_clients=False
    ),
    Contract(
        "vllm.grpc.engine",
        PROTOS / "vllm",
        "*.proto",
        Path(),
        Path(VLLM),
        has_clients=False,
        imported_as=VLLM,
    ),
)


def main() -> int:
    """Write the stubs, or with --check compare them. Returns 0 if all are up to date or written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 on a difference")
    arguments = parser.parse_args()
    fresh = generate()
    stale = different(fresh, ROOT)
    if arguments.check:
        for name in stale:
            print(f"{name} is out of date: run python -m tools.generate_stubs", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        write(ROOT / name, fresh.get(name))
    print(f"{len(fresh)} files, {len(stale)} changed")
    return 0


def generate() -> dict[str, bytes]:
    """Returns the contents of all generated files, by path below the root."""
    made: dict[str, bytes] = {}
    for contract in CONTRACTS:
        made |= _generated(contract)
    return made


def _generated(contract: Contract) -> dict[str, bytes]:
    found_at = Path(contract.imported_as)
    sources = sorted(
        str(found_at / path.relative_to(contract.protos)) for path in contract.protos.glob(contract.sources)
    )
    with tempfile.TemporaryDirectory() as folder:
        status = protoc.main(["protoc", *options(contract, folder), *sources])
        if status:
            raise SystemExit(f"protoc ended with status {status}")
        found = {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*.py*")}
    text = (
        f'"""Generated stubs of the contract `{contract.name}`. Written by tools/generate_stubs.py, never by hand."""\n'
    )
    found[contract.package / "__init__.py"] = text.encode()
    return {(contract.target / path).as_posix(): content for path, content in found.items()}


def options(contract: Contract, folder: str) -> list[str]:
    """Returns protoc's arguments that write the stubs to `folder`: messages, and with `has_clients` the services."""
    scripts = Path(sysconfig.get_path("scripts"))
    plugins = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [f"--python_out={folder}", f"--mypy_out=quiet:{folder}"]
    if contract.has_clients:
        outputs += [f"--grpc_python_out={folder}", f"--mypy_grpc_out=quiet:{folder}"]
    where = f"{contract.imported_as}={contract.protos}" if contract.imported_as else f"{contract.protos}"
    includes = [f"-I{where}", f"-I{importlib.resources.files('grpc_tools') / '_proto'}"]
    return [*includes, *plugins, *outputs]


def different(fresh: dict[str, bytes], root: Path) -> list[str]:
    """Returns the names of files below `root` that are missing, differ from `fresh`, or should not exist."""
    folders = [root / contract.target / contract.package for contract in CONTRACTS]
    present = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for folder in folders
        for path in folder.glob("*.py*")
        if path.is_file()
    }
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def write(path: Path, content: bytes | None) -> None:
    """Write `content`, or remove the file if it is None."""
    if content is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
