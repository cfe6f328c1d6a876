"""Loads a checkpoint's tokenizer with its chat template.

An invalid template is rejected here and not at the first chat. It is only parsed here; `renderer` runs it.
"""

import dataclasses
import os
from pathlib import Path

from sluice_server.engine.models.fields import is_file
from sluice_server.services.config import bad_setting
from sluice_server.services.tokenizer.chat import MAX_SOURCE, TemplateSource, read_template, unreadable
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.found_sections import DETECTED, Parsers
from sluice_server.services.tokenizer.template import check_syntax


def load_encoder(
    directory: Path, num_renderers: int = 1, chat_template: str = "", parsers: Parsers = DETECTED
) -> TextEncoder:
    """Loads the tokenizer and checks the chat template, that of the option where one is given.

    Raises ServiceError MODEL_INVALID naming the file, or INVALID_SETTING. Call the encoder's `close` if it has rendered
    chats.
    """
    return TextEncoder.load(directory, num_renderers, checked_template(directory, chat_template), parsers)


def checked_template(directory: Path, chat_template: str = "") -> TemplateSource:
    """Returns the templates of a checkpoint, or that of the option in their place. Raises as `load_encoder`."""
    source = read_template(directory)
    if chat_template:
        source = dataclasses.replace(source, default=_given(chat_template), tool_use=None)
    for template in filter(None, (source.default, source.tool_use)):
        try:
            check_syntax(template)
        except ValueError as error:
            if chat_template:
                raise bad_setting("chat_template", str(error)) from error
            raise unreadable(directory, str(error)) from error
    return source


def _given(value: str) -> str:
    """Returns the template of a file, or `value` where it has the braces of one."""
    if not os.path.lexists(value):
        if "{" in value:
            return value
        raise bad_setting("chat_template", f"{value[:200]} does not exist, and is no template: it has no braces")
    path = Path(value)
    if not is_file(path) or path.stat().st_size > MAX_SOURCE:
        raise bad_setting("chat_template", f"{value} is no file, or has more than {MAX_SOURCE} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise bad_setting("chat_template", f"{value} cannot be read as UTF-8") from error
