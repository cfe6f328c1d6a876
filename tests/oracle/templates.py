"""Chat templates: of ten public shapes, written for these tests from the facts of the formats, and published ones."""

from pathlib import Path

FOLDER = Path(__file__).parent / "chat_templates"


def _read(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


TEMPLATES = _read(FOLDER)
PUBLISHED = _read(FOLDER / "published")  # its README.md says whose they are


def has_place_for_calls(source: str) -> bool:
    """Whether a template writes tool calls of earlier turns at all."""
    return "tool_calls" in source
