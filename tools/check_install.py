"""Resolves with pip, without downloads, which wheels an ordinary Linux machine would get on each supported Python.

`python -m tools.check_install` fails if constraints cannot be met, a package has no wheel, or a version is not fixed.
`--update` also writes the requirements of torch's ordinary wheel, the one for CUDA, to
tests/deploy/torch_requires.json, by which the tests check constraints.txt without a network. pip evaluates environment
markers for the Python it runs on, so a package that only another Python needs is not found.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
KEPT = ROOT / "tests/deploy/torch_requires.json"
OWN = ("sluice-server", "sluice-client")
# pip reads metadata out of wheels by range requests if the index does not serve it separately
PIP = ("install", "--dry-run", "--ignore-installed", "--quiet", "--use-feature=fast-deps", "--only-binary=:all:")

Packages = Mapping[str, Mapping[str, Any]]  # by canonical name: an entry of pip's report


def main() -> int:
    """Run the command line. Returns 1 if something does not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"write {KEPT.relative_to(ROOT)}")
    update = parser.parse_args().update
    wrong, asked = [], dict[str, set[str]]()
    for python in pythons():
        try:
            found = resolve(python)
        except subprocess.CalledProcessError as error:
            wrong.append(f"Python {python}: pip exits {error.returncode}, see above")
            continue
        needs = reached(found, "torch")
        total, torchs = (sum(map(size_of, (found[name] for name in names))) / 1e9 for names in (found, needs))
        print(
            f"Python {python}: {len(found)} wheels, {total:.2f} GB; torch and what it needs {torchs:.2f} GB", flush=True
        )
        wrong += [
            f"Python {python}: {name}: neither a constraint nor torch settles its version"
            for name in unsettled(found, needs)
        ]
        for name, requires in needs.items():
            asked.setdefault(f"{name}=={found[name]['metadata']['version']}", set()).update(map(str, requires))
    if update and not wrong:
        KEPT.write_text(json.dumps({name: sorted(asked[name]) for name in sorted(asked)}, indent=1) + "\n")
    print("\n".join(wrong) or "everything that is asked for can be installed")
    return bool(wrong)


def pythons() -> list[str]:
    """Returns the versions of Python that pyproject.toml allows."""
    admitted = SpecifierSet(_project(ROOT)["requires-python"])
    return [f"3.{minor}" for minor in range(50) if admitted.contains(f"3.{minor}")]


def constraints() -> dict[str, str]:
    """Returns the version of each package that constraints.txt pins, by canonical name."""
    pins = (line.split("==") for line in CONSTRAINTS.read_text().split())
    return {canonicalize_name(name): version for name, version in pins}


def wanted() -> list[str]:
    """Returns everything that `make demo`, `make test` and the images install, as requirements."""
    project = _project(ROOT)
    lists = (
        project["dependencies"],
        project["optional-dependencies"]["dev"],
        _project(ROOT / "clients/python")["dependencies"],
    )
    # `===` excludes wheels with a local version, such as those for CPU only
    return [f"torch==={constraints()['torch']}"] + [
        line for one in lists for line in one if Requirement(line).name not in (*OWN, "torch")
    ]


def resolve(python: str) -> Packages:
    """Returns what pip would install for that version of Python. Raises CalledProcessError if nothing fits."""
    with tempfile.TemporaryDirectory() as directory:
        report, empty = f"{directory}/report.json", f"{directory}/site"
        target = ("--python-version", python, "--target", empty, "--report", report)
        images = ("-r", str(ROOT / "deploy/requirements-engine.txt"))
        command = (sys.executable, "-m", "pip", *PIP, *target, "-c", str(CONSTRAINTS), *images, *wanted())
        subprocess.run(command, check=True)
        found = json.loads(Path(report).read_text())["install"]
    return {canonicalize_name(one["metadata"]["name"]): one for one in found}


def reached(found: Packages, start: str) -> dict[str, list[Requirement]]:
    """Returns the package and its direct and indirect dependencies, each with its own requirements."""
    needs: dict[str, list[Requirement]] = {}
    left = [(start, frozenset[str]())]
    while left:
        name, extras = left.pop()
        asked = [one for one in requires(found[name], extras) if one not in needs.get(name, ())]
        needs.setdefault(name, []).extend(asked)
        left += [(canonicalize_name(one.name), frozenset(one.extras)) for one in asked]
    return needs


def requires(package: Mapping[str, Any], extras: frozenset[str]) -> list[Requirement]:
    """Returns the requirements of a package with these extras on this machine, without markers."""
    in_force = []
    for line in package["metadata"].get("requires_dist", ()):
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            one.marker = None
            in_force.append(one)
    return in_force


def unsettled(found: Packages, needs: Mapping[str, Sequence[Requirement]]) -> list[str]:
    """Returns the packages whose version is the newest of the day: neither pinned by a constraint nor required
    exactly by torch or one of its dependencies."""
    exact = {canonicalize_name(one.name) for asked in needs.values() for one in asked if is_exact(one)}
    return sorted(found.keys() - exact - constraints().keys())


def is_exact(requirement: Requirement) -> bool:
    """Whether the requirement allows one release only. CUDA's parts are required as ==13.1.1.3.*, their whole
    version."""
    return any(one.operator in ("==", "===") for one in requirement.specifier)


def size_of(package: Mapping[str, Any]) -> int:
    """Returns the bytes of a package's wheel."""
    request = urllib.request.Request(package["download_info"]["url"], method="HEAD")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def _project(directory: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((directory / "pyproject.toml").read_text())["project"]
    return project


if __name__ == "__main__":
    sys.exit(main())
