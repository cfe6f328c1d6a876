"""Checks or writes the version: stated in sluice_server/version.py, and repeated in files that other tools read.

`python -m tools.version` checks that all places agree, `python -m tools.version 0.2.0` writes that version to all of
them. The Go module is fetched by a tag (see docs/releasing.md); the version in its source is what it tells a server.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUMBER = r"\d+\.\d+\.\d+"
# File → patterns before and after the version; every occurrence counts.
PLACES = {
    "sluice_server/version.py": (r'^VERSION = "', r'"'),
    "clients/python/pyproject.toml": (r'^version = "', r'"'),
    "clients/typescript/package.json": (r'^  "version": "', r'"'),
    "clients/typescript/package-lock.json": (r'"name": "sluice-client",\n +"version": "', r'"'),
    "clients/cpp/CMakeLists.txt": (r"^project\(sluice VERSION ", r" "),
    "clients/go/client.go": (r'^const Version = "', r'"'),
    "clients/java/pom.xml": (r"^  <version>", r"</version>"),
    "clients/java/README.md": (r"sluice-client-", r"\.jar"),
    "tests/conformance/go_module.py": (r'^VERSION = "v', r'"'),
    "services/gateway/settings.py": (r'^    version: str = "', r'"'),
    "deploy/kubernetes/kustomization.yaml": (r"newTag: ", r"\}"),
    "compose.yaml": (r"-sluice-(?:text|engine):", r"[-}]"),
}
# The server requires the Python client of the same version.
REQUIREMENT = ("pyproject.toml", (r'"sluice-client==', r'"'))


def main() -> int:
    """Check, or write the given version. Returns 1 if places disagree or the version is malformed."""
    if len(sys.argv) > 1:
        if not re.fullmatch(NUMBER, sys.argv[1]):
            print(f"{sys.argv[1]} is not MAJOR.MINOR.PATCH", file=sys.stderr)
            return 1
        write(ROOT, sys.argv[1])
    found = versions(ROOT)
    for place, those in found.items():
        print(f"{place}: {', '.join(sorted(those)) or 'none'}")
    return 0 if len(set().union(*found.values())) == 1 and all(found.values()) else 1


def versions(root: Path) -> dict[str, set[str]]:
    """Returns the versions that each place states."""
    found: dict[str, set[str]] = {}
    for name, around in (*PLACES.items(), REQUIREMENT):
        stated = (match[2] for match in _pattern(around).finditer((root / name).read_text()))
        found.setdefault(name, set()).update(stated)
    return found


def write(root: Path, version: str) -> None:
    """Write `version` to every place."""
    for name, around in (*PLACES.items(), REQUIREMENT):
        text = (root / name).read_text()
        (root / name).write_text(_pattern(around).sub(rf"\g<1>{version}", text))


def _pattern(around: tuple[str, str]) -> re.Pattern[str]:
    """Returns a pattern with the text before the version as its first group, the version as its second."""
    before, behind = around
    return re.compile(rf"({before})({NUMBER})(?={behind})", re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
