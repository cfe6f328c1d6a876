"""Checks of one value, which name its flag."""

import math

from sluice_server.services.config import bad_setting


def at_least(name: str, value: int, low: int) -> None:
    """Raise ServiceError for a number below the lowest."""
    if value < low:
        raise bad_setting(name, f"{value} is below {low}")


def seconds(name: str, value: float) -> None:
    """Raise ServiceError for what is no number of seconds."""
    if not (math.isfinite(value) and value >= 0):
        raise bad_setting(name, f"{value} is not a number of seconds")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ServiceError for a name that is not among those allowed."""
    if value not in allowed:
        raise bad_setting(name, f"{value!r} is not one of {', '.join(filter(None, allowed))}")
