"""The kinds of sampling parameters and their checks: a number in a range, a flag, a list of ids, biases by id.

Errors name field, value and limit. Stdlib only. `engine.parameters` has the parameters themselves.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from sluice_server.engine.errors import invalid
from sluice_server.engine.request import Limits, SamplingParams

Bound: TypeAlias = "float | Callable[[SamplingParams, Limits], float]"
Dtype: TypeAlias = Literal["float32", "int64"]
LEAST = 2.0**-126  # smallest normal float32: has full precision and is never flushed to 0


def same(value: float) -> float:
    return value


def above_zero(value: float) -> float:
    """Raises a value above 0 to at least `LEAST`: in float32 it must stay above 0, where the meaning changes."""
    return max(value, LEAST) if value > 0.0 else value


def signed(value: float) -> float:
    """Returns a 64-bit key in two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A number that is kept for each slot.

    Attributes:
        neutral: the value of a free slot.
        of: returns the value that a slot keeps.
    """

    name: str
    dtype: Dtype
    neutral: float
    of: Callable[[SamplingParams], float]


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A number in a range.

    Attributes:
        name: the field of `SamplingParams`.
        of: returns its value.
        meaning: a sentence for the documentation.
        low, high: the range, both included unless `is_above`.
        path: its field in a generation's spec; by default `sampling.` and its name.
        is_above: the range excludes `low`.
        off: the value that stands for absence; never out of range.
        absent: what happens when it is not set, if that is not the neutral value.
        said: its name in errors, if not `name`.
        from_model: a model's generation_config.json may set its default.
        dtype: dtype of its column, if slots have one.
        kept: converts its value to that of the column.
    """

    name: str
    of: Callable[[SamplingParams], float]
    meaning: str
    low: Bound
    high: Bound
    path: str = ""
    is_above: bool = False
    off: float | None = None
    absent: str = ""
    said: str = ""
    from_model: bool = False
    dtype: Dtype | None = None
    kept: Callable[[float], float] = same

    @property
    def field(self) -> str:
        return self.path or f"sampling.{self.name}"

    @property
    def neutral(self) -> float:
        """Its value when it is not set."""
        return self.of(SamplingParams())

    @property
    def type(self) -> type[int] | type[float]:
        return int if isinstance(self.neutral, int) else float

    @property
    def column(self) -> Column | None:
        if self.dtype is None:
            return None
        return Column(self.name, self.dtype, self.kept(self.neutral), lambda params: self.kept(self.of(params)))

    def bounds(self, params: SamplingParams, limits: Limits) -> tuple[float, float]:
        low, high = self.low, self.high
        return low(params, limits) if callable(low) else low, high(params, limits) if callable(high) else high

    def check(self, params: SamplingParams, limits: Limits) -> None:
        """Raises `ServiceError` for a value that is out of range."""
        value = self.of(params)
        if value == self.off:
            return
        low, high = self.bounds(params, limits)
        if not self.is_above:
            in_range(self.said or self.name, value, low, high)
        elif not low < value <= high:  # written so that NaN fails
            raise invalid(self.said or self.name, f"{value} is not in ({low:g}, {high:g}]")

    def taken(self, value: float) -> float:
        """Converts the value of a request field."""
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A yes-or-no parameter. For the attributes see `Number`."""

    name: str
    of: Callable[[SamplingParams], bool]
    meaning: str
    path: str

    @property
    def field(self) -> str:
        return self.path

    def check(self, params: SamplingParams, limits: Limits) -> None:
        """Does nothing: both values are valid."""

    def taken(self, value: bool) -> bool:
        """Converts the value of a request field."""
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Ids:
    """A list of token ids. For other attributes see `Number`.

    Attributes:
        most: returns the maximum number of ids.
        is_set: no id may occur twice.
    """

    name: str
    of: Callable[[SamplingParams], tuple[int, ...]]
    meaning: str
    most: Callable[[Limits], int]
    path: str = ""
    is_set: bool = True

    @property
    def field(self) -> str:
        return self.path or f"sampling.{self.name}"

    def check(self, params: SamplingParams, limits: Limits) -> None:
        """Raises `ServiceError` for too many ids, or for one that is out of range or duplicate."""
        ids = self.of(params)
        if not ids:
            return
        check_num(self.name, len(ids), self.most(limits))
        check_ids(self.name, ids, limits)
        if self.is_set:
            check_distinct(self.name, ids)

    def taken(self, value: Iterable[int]) -> tuple[int, ...]:
        """Converts the value of a request field."""
        return tuple(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Biases:
    """A value for each of some token ids. For the attributes see `Ids`."""

    name: str
    of: Callable[[SamplingParams], tuple[tuple[int, float], ...]]
    meaning: str
    most: Callable[[Limits], int]

    @property
    def field(self) -> str:
        return f"sampling.{self.name}"

    def check(self, params: SamplingParams, limits: Limits) -> None:
        """Raises `ServiceError` for too many entries, an id or a value out of range, or a duplicate id."""
        pairs = self.of(params)
        if not pairs:
            return
        check_num(self.name, len(pairs), self.most(limits))
        ids = [token for token, _ in pairs]
        check_ids(self.name, ids, limits)
        check_distinct(self.name, ids)
        for token, value in pairs:
            in_range(f"{self.name}[{token}]", value, -limits.max_logit_bias, limits.max_logit_bias)

    def taken(self, value: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        """Converts the value of a request field, sorted by id."""
        return tuple(sorted(value.items()))


Parameter: TypeAlias = Number | Flag | Ids | Biases


def in_range(field: str, value: float, low: float, high: float) -> None:
    """Raises `ServiceError` for a value that is not in [low, high]."""
    if not low <= value <= high:  # written so that NaN fails
        raise invalid(field, f"{value} is not in [{low}, {high}]", limit=high if value > high else low)


def check_num(field: str, num: int, most: int) -> None:
    """Raises `ServiceError` for more than `most` entries, without their number: a truncated request hides it."""
    if num > most:
        raise invalid(field, f"has more than the {most} entries that are allowed", limit=most)


def check_ids(field: str, ids: Sequence[int], limits: Limits, num_before: int = 0) -> None:
    """Raises `ServiceError` naming the first id outside the width of the logits (not the tokenizer's size). The ids
    follow `num_before` others of the field."""
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        at, value = next((i, t) for i, t in enumerate(ids) if not 0 <= t < limits.vocab_size)
        raise invalid(
            f"{field}[{num_before + at}]", f"{value} is not in [0, {limits.vocab_size})", limit=limits.vocab_size
        )


def check_distinct(field: str, ids: Sequence[int]) -> None:
    """Raises `ServiceError` for an id that occurs twice."""
    if len(set(ids)) < len(ids):
        raise invalid(field, "names an id twice")
