"""Loads a checkpoint's tokenizer with its chat template.

An invalid template is rejected here and not at the first chat. It is only parsed here; `renderer` runs it.
"""

from pathlib import Path

from sluice_server.services.tokenizer.chat import read_template, unreadable
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.template import check_syntax


def load_encoder(directory: Path, num_renderers: int = 1) -> TextEncoder:
    """Loads the tokenizer and checks the chat template. Raises ServiceError MODEL_INVALID naming the file.

    Call the encoder's `close` if it has rendered chats.
    """
    encoder = TextEncoder.load(directory, num_renderers)
    check_template(directory)
    return encoder


def check_template(directory: Path) -> None:
    """Raises ServiceError MODEL_INVALID for a template that cannot be parsed."""
    source = read_template(directory)
    for template in filter(None, (source.default, source.tool_use)):
        try:
            check_syntax(template)
        except ValueError as error:
            raise unreadable(directory) from error
