"""Reads a checkpoint's chat template and special tokens, and renders conversations to text.

Files are read at start. Templates are rendered in the child processes of `renderer` (see `template`).
"""

import dataclasses
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice_server.engine.errors import Code, ServiceError, invalid
from sluice_server.engine.models.fields import is_file, read_json
from sluice_server.services.messages.work import ChatPrompt, Sections
from sluice_server.services.sections.splitters import section_marks
from sluice_server.services.tokenizer.child_pool import PATIENCE, CpuTimeLimit
from sluice_server.services.tokenizer.control_tokens import control_tokens
from sluice_server.services.tokenizer.found_sections import DETECTED, Parsers, placed_format, sections_of
from sluice_server.services.tokenizer.placing import placement_of
from sluice_server.services.tokenizer.render_frames import Rendered, TemplateSetup
from sluice_server.services.tokenizer.renderer import Renderers

MAX_SOURCE = 1 << 20  # characters
_NO_TOKENS: Mapping[str, bool] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateSource:
    """The chat templates and special tokens of a checkpoint, as its files have them.

    Attributes:
        default: the template; None for a model that has none.
        tool_use: the template for chats with tools, where a checkpoint has a separate one.
        special_tokens: bos_token, eos_token, … by name.
    """

    default: str | None = None
    tool_use: str | None = None
    special_tokens: dict[str, str] = dataclasses.field(default_factory=dict)


class ChatTemplate:
    """Renders conversations with a checkpoint's template, or with that of a request. Without one `render` raises
    NO_CHAT_TEMPLATE."""

    def __init__(
        self,
        source: TemplateSource,
        num_renderers: int = 1,
        patience: CpuTimeLimit = PATIENCE,
        added_tokens: Mapping[str, bool] = _NO_TOKENS,
        parsers: Parsers = DETECTED,
    ) -> None:
        """`added_tokens`: the tokenizer's, with whether they are special."""
        self.source = source
        self._parsers = parsers
        self._added_tokens = added_tokens
        own = None if source.default is None else _setup(source.default, source, added_tokens, parsers)
        self._renderers = None if own is None else Renderers(own, num_renderers, patience)
        # A template that breaks out of its sandbox meets no chats but those that bring templates themselves.
        self._of_requests = Renderers(None, num_renderers, patience)

    def render(self, prompt: ChatPrompt, max_bytes: int) -> Rendered:
        """Returns the prompt as text. Raises ServiceError: no template, rejected messages, or a limit exceeded."""
        try:
            if prompt.template:
                return self._of_requests.render(prompt, max_bytes, self._setup_of(prompt.template))
            if self._renderers is None:
                raise ServiceError(
                    Code.FAILED_PRECONDITION,
                    "NO_CHAT_TEMPLATE",
                    "prompt.chat: this model has no chat template; send the prompt as text",
                    field="prompt.chat",
                )
            return self._renderers.render(prompt, max_bytes)
        except UnicodeEncodeError as error:
            raise invalid("prompt.chat", "is not valid Unicode: it has a lone surrogate") from error

    def sections(self, prompt: ChatPrompt, rendered: Rendered) -> Sections:
        """Returns the sections that an output for a rendered prompt may have."""
        source = prompt.template or (prompt.tools and self.source.tool_use) or self.source.default or ""
        return sections_of(source, prompt, rendered, self._parsers)

    def _setup_of(self, template: str) -> TemplateSetup:
        """Returns the setup for a request's own template."""
        alone = dataclasses.replace(self.source, tool_use=None)
        return _setup(template, alone, self._added_tokens, self._parsers)

    def close(self) -> None:
        """Ends the renderer processes."""
        self._of_requests.close()
        if self._renderers is not None:
            self._renderers.close()


def _setup(default: str, source: TemplateSource, added_tokens: Mapping[str, bool], parsers: Parsers) -> TemplateSetup:
    """Builds what a renderer process needs of templates."""
    tool_use = source.tool_use or ""
    control = control_tokens(added_tokens, (default, tool_use))
    written = tuple(one for one in section_marks() if one in control and not added_tokens[one])
    known = placed_format(tool_use or default, parsers)
    placement = None if known is None else placement_of(known)
    return TemplateSetup(default, tool_use, source.special_tokens, control, written, placement)


def read_template(directory: Path) -> TemplateSource:
    """Reads chat_template.jinja and additional_chat_templates/tool_use.jinja, else tokenizer_config.json.

    Without a template there, chat_template.json is read, in which models that take images were published. Raises
    ServiceError MODEL_INVALID.
    """
    try:
        config = _read(directory / "tokenizer_config.json")
        value = config.get("chat_template") or _read(directory / "chat_template.json").get("chat_template")
        named = _named(value)
        for name, path in (
            ("default", directory / "chat_template.jinja"),
            ("tool_use", directory / "additional_chat_templates" / "tool_use.jinja"),
        ):
            if os.path.lexists(path):
                if not is_file(path):
                    raise ValueError(path)
                named[name] = path.read_text(encoding="utf-8")
        for source in named.values():
            if len(source) > MAX_SOURCE:
                raise ValueError(len(source))
        tokens = _special_tokens(_read(directory / "special_tokens_map.json") | config)
        return TemplateSource(named.get("default"), named.get("tool_use"), tokens)
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise unreadable(directory) from error


def unreadable(directory: Path, why: str = "") -> ServiceError:
    """Builds the error for a chat template whose files cannot be read."""
    text = f"{directory}: the chat template cannot be read{f': {why}' if why else ''}"
    return ServiceError(Code.FAILED_PRECONDITION, "MODEL_INVALID", text)


def _read(path: Path) -> dict[str, Any]:
    """Reads a JSON object; returns an empty one if the file does not exist. Raises ServiceError MODEL_INVALID."""
    return read_json(path) if os.path.lexists(path) else {}


def _named(value: object) -> dict[str, str]:
    """Returns the templates "default" and "tool_use" by name; chat_template is a string or a list of named ones."""
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        return {name: named[name] for name in ("default", "tool_use") if name in named}
    return {"default": value} if isinstance(value, str) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Returns bos_token, eos_token, … as strings; older files wrap them in objects."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found
