"""Writes grammars of tool calls in llguidance's form: of nothing but calls, or of calls within any text. Pure.

Schemas come from clients, so this runs only in `grammar_child`, where time and memory are limited.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from sluice_server.services.tokenizer.found_sections import is_text
from sluice_server.services.tokenizer.grammar_errors import FormError
from sluice_server.services.tokenizer.grammar_frames import Calls, TagRules

Grammar = dict[str, Any]  # one entry of llguidance's list
_ANY = r"/(.|\n)*/"
# What a schema of a text may say where the text is not JSON; nothing else could be enforced.
_OF_TEXTS = frozenset(["type", "enum", "title", "description", "default", "examples"])


def calls_grammars(calls: Calls, schema_of: Callable[..., Grammar]) -> list[Grammar]:
    """Returns a grammar of tool calls, then those of the arguments. Raises FormError."""
    subs: list[Grammar] = []
    bodies = []
    for at, tool in enumerate(calls.tools):
        schema = schema_of(tool.parameters, is_object=True)
        if calls.tags is not None:
            arguments, found = _parameters(at, schema, calls.tags)
            subs += found
        else:
            arguments = f"@tool_{at}"
            subs.append({"name": f"tool_{at}", "json_schema": schema})
        bodies.append(f"{tool.begin} {arguments} {tool.end}")
    rules = [f"body: {' | '.join(bodies)}"]
    rules += _only_calls(calls) if calls.is_required else _calls_in_text(calls)
    texts = dict(rule for sub in subs for rule in sub.pop("rules", {}).items())
    rules += [f"{name}{rule}" for name, rule in texts.items()]
    return [{"lark_grammar": "\n".join(rules) + "\n"}, *[sub for sub in subs if sub]]


def until(mark: str, rule: str) -> str:
    """Returns a rule for any text up to a mark, which is a literal or a special token that text cannot spell."""
    if mark.startswith("<["):
        return f"{rule}: {_ANY} {mark}"
    return f"{rule}[suffix={mark}]: {_ANY}"


def _only_calls(calls: Calls) -> list[str]:
    more = f"({calls.separator} call)*" if calls.parallel else ""
    opening = " ".join(calls.opening)
    return [f"start: {' '.join(calls.first)} call {more} {calls.last}", f"call: {opening} body"]


def _calls_in_text(calls: Calls) -> list[str]:
    """Returns rules for any text in which whatever begins like a call is one."""
    rules, ways = [], []
    texts = [text for text, mark in calls.openings if not mark.startswith("<[")]
    tail = "".join(f" & ~/(.|\\n)*{_regex(text)}(.|\\n)*/" for text in texts)
    if calls.starts:
        tail += f" & ~/[ \\t\\r\\n]*[{_regex(calls.starts)}](.|\\n)*/"
        more = f"({calls.separator} body)*" if calls.parallel else ""
        ways.append(f"/[ \\n]*/ {' '.join(calls.first)} body {more} {calls.last}")
    rules.append(f"TAIL: {_ANY}{tail}")
    ways += _with_tail(calls, rules)
    return [f"start: {' | '.join(ways)}", *rules]


def _with_tail(calls: Calls, rules: list[str]) -> list[str]:
    """Returns the ways to write text, with calls behind an opening if there is one; adds the rules that they need."""
    marked = calls.opening or calls.first
    if calls.answer:  # calls and text are messages of their own
        return [f"{calls.answer} TAIL", f"{' '.join(marked)} body"]
    if not marked or calls.starts:
        return ["TAIL"]
    mark, *others = marked
    rules.append(until(mark, "upto"))
    several = f"({calls.separator} body)*" if calls.parallel and not calls.opening else ""
    rules.append(f"tagged: upto {' '.join(others)} body {several} {calls.last}")
    return ["tagged* TAIL"] if calls.parallel else ["TAIL", "tagged"]


def _parameters(at: int, schema: Grammar, tags: TagRules) -> tuple[str, list[Grammar]]:
    """Returns a rule for arguments with a tag each, and the grammars of its values. Raises FormError."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise FormError("properties is an object and required a list", "/properties")
    if missing := [name for name in required if name not in properties]:
        raise FormError(f"requires {str(missing[0])[:80]!r}, which is none of its properties", "/required")
    shared: Grammar = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    parts, subs = [], []
    for number, (name, value) in enumerate(properties.items()):
        if not re.fullmatch(r'[^<>"\n]{1,256}', name):
            raise FormError("has a name that cannot be written as a tag", f"/properties/{name[:80]}")
        key = f"value_{at}_{number}"
        rule, sub = _value(key, name, value, shared, tags)
        subs.append(sub)
        one = f"{tags.key} {json.dumps(name, ensure_ascii=False)} {rule}"
        parts.append(one if name in required else f"({one})?")
    return " ".join(parts), subs


def _value(key: str, name: str, schema: object, shared: Grammar, tags: TagRules) -> tuple[str, Grammar]:
    """Returns a rule for one value with the tags around it, and its grammar or rules."""
    end = f"{tags.end} {tags.more}"
    if not isinstance(schema, dict) or not is_text(schema):
        value = schema if isinstance(schema, dict) else {}
        return f"{tags.values} @{key} {end}", {"name": key, "json_schema": {**shared, **value}}
    if unknown := sorted(schema.keys() - _OF_TEXTS):
        raise FormError(f"{unknown[0]} of a text cannot be enforced in this model's form", f"/properties/{name[:80]}")
    if "enum" in schema:
        values = [one for one in schema["enum"] if isinstance(one, str)]
        choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in values)
        return f"{tags.texts} ({choices}) {end}", {}
    return f"{tags.texts} {key} {tags.more}", {"rules": {key: until(tags.end, "")}}


def _regex(text: str) -> str:
    """Returns a regular expression that matches the text, within slashes."""
    return re.sub(r"([][.^$*+?(){}|/\\])", r"\\\1", text)
