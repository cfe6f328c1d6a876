"""Checks of the plain Python values that requests are made of: each error names the option."""

import reprlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

_T = TypeVar("_T")


def check_names(given: Iterable[str], known: Mapping[str, object], of: str) -> None:
    """Raises TypeError for an option that is not known; `of` says of what the known ones are."""
    for name in given:
        if name not in known:
            raise TypeError(f"{name!r} is no option of {of}; there are {', '.join(known)}")


def choose(name: str, value: object, table: Mapping[str, _T]) -> _T:
    """Returns what an option's value stands for. Raises ValueError for a value that the table lacks."""
    if not isinstance(value, str) or value not in table:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(table)}")
    return table[value]


def unfit(name: str, value: object, error: Exception) -> TypeError | ValueError:
    """Returns the error of a value that a field cannot hold, naming the option; `error` is what protobuf raised."""
    kind = ValueError if isinstance(error, ValueError) else TypeError
    return kind(f"{name}: {reprlib.repr(value)} does not fit: {error}")
