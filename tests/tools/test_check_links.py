"""The link checker of the documents: what it finds and skips, and no finding in this repository."""

from pathlib import Path

import pytest

from tools.check_links import ROOT, anchors, pages, problems


def found(root: Path, text: str) -> list[str]:
    """The problems found in a page of this text, without its name, in a repository of two folders and one target."""
    (root / "engine").mkdir()
    (root / "sluice_server").mkdir()
    (root / "sluice_server" / "engine").symlink_to(root / "engine")
    (root / "engine" / "plan.py").touch()
    (root / "other.md").write_text("# A `plan`, and more\n")
    (root / "Makefile").write_text("help:\ntest: ## tests\n")
    page = root / "page.md"
    page.write_text(text)
    return [one.removeprefix("page.md: ") for one in problems(root, page)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[x](gone.md)", "link gone.md"),
        ("[`x`](gone.md)", "link gone.md"),
        ("[x](other.md#a-plan)", "link other.md#a-plan"),
        ("[x](#nowhere)", "link #nowhere"),
        ("see `engine/gone.py`", "path engine/gone.py"),
        ("see `engine/gone/`", "path engine/gone/"),
        ("`python -m sluice_server.engine.gone --seed 1`", "module sluice_server.engine.gone"),
        ("`make rest`", "make target rest"),
    ],
)
def test_what_is_not_there_is_found(text: str, problem: str, tmp_path: Path) -> None:
    assert found(tmp_path, text) == [problem]


@pytest.mark.parametrize(
    "text",
    [
        "[x](other.md#a-plan-and-more) [y](https://example.org/gone.md) [z](engine/plan.py)",
        "`engine/plan.py`, `engine/`, `python -m sluice_server.engine.plan`, `make test SEED=1`, "
        "`application/json`, `and/or`",
        "```sh\nls engine/gone.py # [x](gone.md)\n```\n",
        "# Here\n[x](#here)",
    ],
)
def test_what_is_there_or_elsewhere_is_none(text: str, tmp_path: Path) -> None:
    assert found(tmp_path, text) == []


def test_equal_headings_have_different_anchors() -> None:
    assert anchors("# A\n## A\n## B `c`: d\n") == {"a", "a-1", "b-c-d"}


def test_everything_that_the_documents_of_this_repository_name_is_there() -> None:
    assert {ROOT / "README.md", ROOT / "docs/hardening.md", ROOT / "clients/go/README.md"} <= set(pages(ROOT))
    assert [problem for page in pages(ROOT) for problem in problems(ROOT, page)] == []
