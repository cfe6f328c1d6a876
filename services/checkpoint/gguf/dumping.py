"""Writes configuration files into a checkpoint directory."""

import json
from pathlib import Path

from sluice_server.engine.models.fields import Json


def dump(folder: Path, configuration: dict[str, dict[str, Json]]) -> None:
    """Writes configuration files into a directory."""
    for name, content in configuration.items():
        indent = None if name == "tokenizer.json" else 2
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=indent) + "\n", encoding="utf-8")
