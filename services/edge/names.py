"""Turns the fields that an error of sluice.v1 names into those that the HTTP client wrote. Pure."""

import functools
import re
from collections.abc import Callable, Mapping

_INDEX = re.compile(r"\[\w+\]")
_SLOT = re.compile(r"\[-?\]")
_DROPPED = "[-]"
_REST = ".*"
_PATH = re.compile(r"(?<![\w.'\"`/-])[a-z_]+(?:\[\d+\])*(?:\.[a-z_]+(?:\[\d+\])*)+")
# Errors name sampling parameters and output options with their message or without it.
_LEFT_OUT = re.compile(r"^(?:sampling|output)\.")


class FieldNames:
    """The client's names of fields, by their paths in the contract without indices.

    In a name `[]` is the next index of the path, and `[-]` one that the client did not write; `.*` at its end is what
    follows in the path. A path takes the name of its longest beginning; without one it stays as it is.
    """

    def __init__(self, names: Mapping[str, str] | Callable[[], Mapping[str, str]]) -> None:
        """`names` may be made when the first error comes, which few requests have."""
        self._given = names

    @functools.cached_property
    def _names(self) -> Mapping[str, str]:
        names = self._given() if callable(self._given) else self._given
        return {**{_LEFT_OUT.sub("", path): name for path, name in names.items()}, **names}

    def of_item(self, name: str, index: int) -> "FieldNames":
        """Returns names for a request about one item of a list: `name` is `name[index]`."""
        item = f"{name}[{index}]"

        def made() -> Mapping[str, str]:
            names = self._names
            found = {path: one.replace(name, item, 1) for path, one in names.items() if _SLOT.sub("", one) == name}
            return {**names, **found}

        return FieldNames(made)

    def of(self, path: str) -> str:
        """Returns the client's name of a path."""
        parts = path.split(".")
        bare = [part.partition("[")[0] for part in parts]
        for num in range(len(parts), 0, -1):
            name = self._names.get(".".join(bare[:num]))
            if name is not None:
                return _filled(name, parts, num)
        return path

    def within(self, text: str, path: str) -> str:
        """Returns an error's text with the client's names; `path` is the field at fault, with which most begin."""
        rest = text.removeprefix(path) if path else text
        is_leading = len(rest) < len(text) and not rest[:1].isalnum() and rest[:1] not in ("_", ".", "[")
        head, rest = (self.of(path), rest) if is_leading else ("", text)
        return head + _PATH.sub(lambda found: self.of(found[0]), rest)


def _filled(name: str, parts: list[str], num: int) -> str:
    """Returns a name with the indices of a path, of which it names `num` parts."""
    has_rest = name.endswith(_REST)
    indices = iter(_INDEX.findall(".".join(parts[:num] if has_rest else parts)))

    def fill(slot: re.Match[str]) -> str:
        index = next(indices, "")
        return "" if slot[0] == _DROPPED else index

    head = _SLOT.sub(fill, name.removesuffix(_REST))
    return ".".join([head, *(parts[num:] if has_rest else [])])


UNNAMED = FieldNames({})
