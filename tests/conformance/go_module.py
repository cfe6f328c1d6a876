"""A program's module that requires the Go client's: built in module mode, and without a network, as all is vendored.

The client comes from the files that its module has, its dependencies from Debian's packages at the versions that its
go.mod names; what that does not name cannot be built.
"""

import itertools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.conformance.commands import run
from tests.conformance.sdks import CLIENTS

SDK = "example.com/sluice/go"
VERSION = "v0.1.0"
DEBIAN = Path("/usr/share/gocode/src")
SOURCE = CLIENTS / "go"


class Consumer:
    """The module in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        required = dict(re.findall(r"^\t(\S+) (\S+)", (SOURCE / "go.mod").read_text(), re.M))
        vendor(folder / "vendor", {SDK: VERSION, **required})
        lines = "".join(f"\t{path} {version}\n" for path, version in {SDK: VERSION, **required}.items())
        (folder / "go.mod").write_text(f"module example.com/consumer\n\ngo 1.19\n\nrequire (\n{lines})\n")

    def run(self, program: str, name: str) -> str:
        """Builds and runs the program, and returns its output."""
        place = self._folder / name
        place.mkdir()
        (place / "main.go").write_text(program)
        assert not run("gofmt", "-l", "main.go", cwd=place), "not as gofmt has it"
        run("go", "vet", "-mod=vendor", ".", cwd=place)
        return run("go", "run", "-mod=vendor", ".", cwd=place)


def vendor(place: Path, versions: Mapping[str, str]) -> None:
    """Vendors the client's packages, and writes their list."""
    packages = sorted(packages_needed(), key=lambda package: (module_of(package, versions), package))
    listed = []
    for module, group in itertools.groupby(packages, lambda package: module_of(package, versions)):
        listed += [f"# {module} {versions[module]}", "## explicit; go 1.19"]
        for package in group:
            source = SOURCE / package[len(SDK) :].lstrip("/") if module == SDK else DEBIAN / package
            copy(source, place / package)
            listed.append(package)
    (place / "modules.txt").write_text("\n".join(listed) + "\n")


def packages_needed() -> list[str]:
    """The packages outside the standard library that the driver's own source tree needs."""
    environment = ("env", "GO111MODULE=off", f"GOPATH={SOURCE / 'build' / 'gopath'}:{DEBIAN.parent}")
    listing = ("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", SDK)
    return run(*environment, *listing, cwd=SOURCE).split()


def module_of(package: str, versions: Mapping[str, str]) -> str:
    """The module that contains a package."""
    found = [module for module in versions if f"{package}/".startswith(f"{module}/")]
    assert found, f"go.mod names no module with {package}"
    return max(found, key=len)


def copy(source: Path, place: Path) -> None:
    """Copies the files of one package."""
    place.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith("_test.go"):
            shutil.copy(file, place)
