"""Finds out which control tokens in a rendered chat were written by content and not by the template.

A control token is a special token, or another added token that the chat template writes, such as <tool_call>. Before a
template runs, the characters of content that make up control tokens are replaced by stand-ins: lone surrogates, which
no valid text has. They keep the length of a text, and pass through trim, slices, joins and JSON. In the rendered text
they show what came from content, also where only a part of a token did. Pure.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_BRACKETS = frozenset("<>[]|｜")
_MARK = re.compile(r"[^\w\s]\S*\w\S*[^\w\s]")  # of added tokens </think> is a mark, and neither \n\n nor ```
_FIRST, _LAST = 0xD800, 0xDFFF  # the last one is no stand-in: see `open_message`
STAND_INS = f"{chr(_FIRST)}-{chr(_LAST)}"  # in a regular expression's set
_STAND_IN = re.compile(f"[{STAND_INS}]")


def control_tokens(added: Mapping[str, bool], sources: Sequence[str]) -> tuple[str, ...]:
    """Returns the control tokens among added tokens, of which `added` says whether they are special.

    A token of one character is left out, as no part of it could be encoded alone.
    """
    return tuple(
        sorted(
            text
            for text, special in added.items()
            if len(text) > 1 and (special or (_MARK.fullmatch(text) and any(text in one for one in sources)))
        )
    )


class ContentMarker:
    """Replaces characters of content by stand-ins, and finds where a rendered text must be cut.

    There are two ways. The wide one replaces every bracket of content, so that a token that content and template make
    together is found too; a template that looks for brackets in content may then write something else. The narrow one
    replaces characters of whole tokens only.
    """

    def __init__(self, tokens: Sequence[str], written: Sequence[str]) -> None:
        """`written`: control tokens that stand in an assistant's content as the model wrote them."""
        characters = sorted({one for token in tokens for at, one in enumerate(token) if not at or not one.isalnum()})
        self._stand_ins = {one: chr(_FIRST + at) for at, one in enumerate(characters)}
        self._brackets = sorted(_BRACKETS.intersection(characters))
        self._tokens = _regex(tokens)
        self._unbracketed = _regex([one for one in tokens if not _BRACKETS.intersection(one)])
        self._written = _regex(written)

    def wide(self, text: str) -> str:
        """Returns `text` with stand-ins for its brackets, and in tokens without brackets."""
        for one in self._brackets:
            text = text.replace(one, self._stand_ins[one])
        return self._inside(self._unbracketed, text)

    def narrow(self, text: str) -> str:
        """Returns `text` with stand-ins in whole tokens only."""
        return self._inside(self._tokens, text)

    def restore(self, marked: str) -> str:
        """Returns `marked` with the characters that stand-ins are for."""
        for one, stand_in in self._stand_ins.items():
            marked = marked.replace(stand_in, one)
        return marked

    def cuts(self, marked: str, text: str) -> tuple[int, ...]:
        """Returns the places in `text`, inside of tokens, that separate what came from content; `marked` is `text`
        with stand-ins."""
        found, start = [], 0
        while (match := self._tokens.search(text, start)) is not None:
            start, end = match.span()
            stand_in = _STAND_IN.search(marked, start, end)
            if stand_in is None:
                start = end  # the template's own
                continue
            start = max(stand_in.start(), start + 1)
            found.append(start)
        return tuple(found)

    def except_written(self, mark: Callable[[str], str]) -> Callable[[str], str]:
        """Returns `mark` for an assistant's content: what the model writes itself is left as it is."""

        def marked(text: str) -> str:
            found, start = [], 0
            for match in self._written.finditer(text):
                found += [mark(text[start : match.start()]), match.group()]
                start = match.end()
            return "".join([*found, mark(text[start:])])

        return marked

    def _inside(self, tokens: re.Pattern[str], text: str) -> str:
        return tokens.sub(lambda match: self._token(match[0]), text)

    def _token(self, token: str) -> str:
        """Returns a token with stand-ins for its first character and for others that have no upper and lower case."""
        stand_ins = self._stand_ins
        return stand_ins[token[0]] + "".join(one if one.isalnum() else stand_ins[one] for one in token[1:])


def in_variables(given: Mapping[str, Any], marker: ContentMarker, mark: Callable[[str], str]) -> dict[str, Any]:
    """Returns the variables of a template with all content marked; roles are not content."""
    by_assistant = marker.except_written(mark)
    messages = []
    for message in given["messages"]:
        marked: dict[str, Any] = _each(message, mark)
        if message["role"] == "assistant" and "content" in message:
            marked["content"] = by_assistant(message["content"])
        messages.append(marked | {"role": message["role"]})
    others = {name: _each(value, mark) for name, value in given.items() if name != "messages"}
    return {**others, "messages": messages}


def _each(
    value: Any,  # noqa: ANN401 # any JSON value
    mark: Callable[[str], str],
) -> Any:  # noqa: ANN401
    """Returns a JSON value with every text in it marked."""
    match value:
        case str():
            return mark(value)
        case list():
            return [_each(one, mark) for one in value]
        case dict():
            return {mark(name): _each(one, mark) for name, one in value.items()}
        case _:
            return value


def _regex(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns an expression for the longest of `texts` at a place; for none of them it matches nothing."""
    return re.compile(_any_of(sorted(texts)) if texts else r"(?!)")


def _any_of(texts: Sequence[str]) -> str:
    """Returns an expression in which texts share their beginnings, as there may be thousands."""
    low, high = min(texts), max(texts)
    head = low[: next((at for at, both in enumerate(zip(low, high, strict=False)) if both[0] != both[1]), len(low))]
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[len(head) : len(head) + 1], []).append(text[len(head) :])
    may_end = rests.pop("", None) is not None
    if not rests:
        return re.escape(head)
    return f"{re.escape(head)}(?:{'|'.join(map(_any_of, rests.values()))}){'?' if may_end else ''}"
