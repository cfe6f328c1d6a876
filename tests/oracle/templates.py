"""Chat templates of ten public shapes, written for these tests from the facts of the formats."""

from pathlib import Path

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}
