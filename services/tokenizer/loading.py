"""Loads a checkpoint's tokenizer with its chat template.

A template that is none is refused here, and not at the first chat: it is parsed here, and run elsewhere (`renderer`).
"""

from pathlib import Path

from sluice_server.services.tokenizer.chat import read_template, unreadable
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.template import check_syntax


def load_encoder(directory: Path, num_renderers: int = 1) -> TextEncoder:
    """`close` it when chats were rendered. Raises ServiceError MODEL_INVALID naming the file."""
    encoder = TextEncoder.load(directory, num_renderers)
    check_template(directory)
    return encoder


def check_template(directory: Path) -> None:
    """Raise ServiceError MODEL_INVALID for a template that is none."""
    source = read_template(directory)
    for template in filter(None, (source.default, source.tool_use)):
        try:
            check_syntax(template)
        except ValueError as error:
            raise unreadable(directory) from error
