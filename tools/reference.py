"""Write the generated pages of `docs/reference`, or check that they are up to date.

`python -m tools.reference` writes, `--check` compares and exits 1 on a difference. Needs the `dev` extra.
"""

import argparse
import sys
from pathlib import Path

from tools import reference_contract, reference_fields, reference_metrics, reference_settings

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("docs/reference")


def main() -> int:
    """Write the pages, or with --check compare them. Returns 0 if all are up to date or written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing; exit 1 on a difference")
    arguments = parser.parse_args()
    stale = stale_pages(ROOT)
    if arguments.check:
        for path in stale:
            print(f"{path} is out of date: run make reference", file=sys.stderr)
        return 1 if stale else 0
    for path, text in stale.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
        print(f"{path} is written")
    return 0


def pages() -> dict[Path, str]:
    """Returns every generated page, by its path below the root."""
    return {
        FOLDER / "contract.md": reference_contract.page(reference_contract.descriptors()),
        FOLDER / "options.md": reference_settings.page(),
        FOLDER / "metrics.md": reference_metrics.page(),
        FOLDER / "http-fields.md": reference_fields.page(),
    }


def stale_pages(root: Path) -> dict[Path, str]:
    """Returns the pages that differ from their file below `root`, with the right text."""
    made = pages()
    found = {path: (root / path).read_text() if (root / path).exists() else "" for path in made}
    return {path: text for path, text in made.items() if found[path] != text}


if __name__ == "__main__":
    sys.exit(main())
