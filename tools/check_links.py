"""Checks, without a network, that the links and names in the repository's Markdown files exist.

`python -m tools.check_links` prints a line for each problem: a relative link without its file, an anchor without its
heading, a path in backticks that begins with a folder of the repository and does not exist, `python -m` of a module or
`make` of a target that does not exist. Exit status 1 if there is any. Code blocks are skipped, and so are paths with a
NAME to be filled in.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSED_OVER = {"node_modules", "build", "dist", "site"}  # folders of installed packages and build results
MADE = ("benchmarks/out", "deploy/wheels", "kernels/triton/tuned")  # paths that exist only after a command has run
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
REPOSITORY_PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*")
MODULE = re.compile(r"python3? -m ([\w.]+)")
TARGET = re.compile(r"^make ([a-z][a-z-]*)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:")  # a link with a scheme


def main() -> int:
    """Print the problems. Returns 1 if there are any."""
    found = [problem for path in pages(ROOT) for problem in problems(ROOT, path)]
    for problem in found:
        print(problem, file=sys.stderr)
    print(f"{len(pages(ROOT))} pages, {len(found)} names of what is not there")
    return 1 if found else 0


def pages(root: Path) -> list[Path]:
    """Returns the Markdown files below `root`, except in hidden folders (other than .github) and build folders."""
    found: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [one for one in below if one == ".github" or not (one in PASSED_OVER or one.startswith("."))]
        found += [Path(folder) / name for name in names if name.endswith(".md")]
    return sorted(found)


def problems(root: Path, page: Path) -> Iterator[str]:
    """Yields a line for each name on the page that does not exist."""
    text = FENCE.sub("", page.read_text())
    prose = CODE.sub("", text)
    missing = [f"link {target}" for target in LINK.findall(prose) if not _resolves(page, target)]
    # a link's text may be code
    missing += [f"link {target}" for target in LINK.findall(CODE.sub("x", text)) if not _resolves(page, target)]
    missing += [problem for code in CODE.findall(text) for problem in _missing(root, page, code)]
    yield from (f"{page.relative_to(root)}: {one}" for one in dict.fromkeys(missing))


def anchors(text: str) -> set[str]:
    """Returns the anchors of the page's headings, as GitHub and the documentation site make them."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"[*`]", "", heading).lower()).replace(" ", "-")
        name, num = slug, 0
        while name in found:
            num += 1
            name = f"{slug}-{num}"
        found.add(name)
    return found


def _resolves(page: Path, target: str) -> bool:
    if ELSEWHERE.match(target):
        return True
    name, _, anchor = target.partition("#")
    there = (page.parent / name) if name else page
    if not there.exists():
        return False
    return not anchor or anchor in anchors(there.read_text())


def _missing(root: Path, page: Path, code: str) -> Iterator[str]:
    if REPOSITORY_PATH.fullmatch(code) and "NAME" not in code and not _is_there(root, page, code):
        yield f"path {code}"
    for module in MODULE.findall(code):
        top = module.split(".")[0]
        path = root / module.replace(".", "/")
        if (root / top).is_dir() and top not in PASSED_OVER and not (path.is_dir() or path.with_suffix(".py").exists()):
            yield f"module {module}"
    target = TARGET.match(code)
    if target is not None and f"\n{target[1]}:" not in (root / "Makefile").read_text():
        yield f"make target {target[1]}"


def _is_there(root: Path, page: Path, code: str) -> bool:
    """Whether the path exists below the root or the page's folder. True if it does not begin with a folder of the
    repository."""
    top = code.split("/")[0]
    if top.startswith(".") or not (root / top).is_dir() or top in PASSED_OVER or code.startswith(MADE):
        return True
    return (root / code).exists() or (page.parent / code).exists()


if __name__ == "__main__":
    sys.exit(main())
