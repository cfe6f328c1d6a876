"""A checkpoint's chat template, rendered as Hugging Face does, in jinja2's immutable sandbox.

The template is data from a model repository: it can neither reach Python objects' internals nor change what it is
given. Knows no tokenizer: gives text.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import Code, ServiceError, invalid
from services.work import ChatMessage


class ChatTemplate:
    """`render` turns messages into the text that the model was trained on; without a template it refuses."""

    def __init__(self, source: str | None, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self._template = None if source is None else _environment().from_string(source)

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """From chat_template.jinja, or from tokenizer_config.json. Raises ServiceError MODEL_INVALID."""
        try:
            config = _read(directory / "tokenizer_config.json")
            own = directory / "chat_template.jinja"
            source = own.read_text(encoding="utf-8") if own.exists() else _default(config.get("chat_template"))
            return cls(source, _special_tokens(_read(directory / "special_tokens_map.json") | config))
        except (OSError, ValueError, AttributeError, TemplateSyntaxError) as error:
            raise ServiceError(
                Code.FAILED_PRECONDITION, "MODEL_INVALID", f"{directory}: the chat template cannot be read"
            ) from error

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        """The prompt as text. Raises ServiceError: no template, or the template refuses these messages."""
        if self._template is None:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "NO_CHAT_TEMPLATE",
                "prompt.chat: this model has no chat template; send the prompt as text",
                field="prompt.chat",
            )
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except _Refused as error:
            raise invalid("prompt.chat", f"the model's chat template refuses: {error}") from error
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise invalid("prompt.chat", "the model's chat template cannot render these messages") from error


class _Refused(TemplateError):
    """A template called raise_exception: its message is meant for the user."""


class _Generation(Extension):
    """{% generation %} marks what an assistant wrote, for training; the text is the same without it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,  # noqa: ANN401 # any JSON value of a template
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML; a prompt is none."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file. Raises OSError, ValueError."""
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(value, dict):
        raise ValueError(path)
    return value


def _default(value: object) -> str | None:
    """chat_template is a string, or a list of named ones of which "default" is meant."""
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, … as strings; older files wrap them in objects."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found
