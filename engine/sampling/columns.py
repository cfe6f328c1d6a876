"""The sampling parameters that are kept as columns of numbers: one table that whoever packs or reads them goes by.

A row belongs to one output, by its parameters and its index. Floats and integers lie in a table each.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from engine.request import SamplingParams
from engine.sampling.rows import AllowedTokenRows, LogitBiasRows, LogprobRows, SamplingParamRows

Table: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class Column(NamedTuple):
    """Attributes:
    name: as of `SamplingParamRows`.
    neutral: what a row has that belongs to nobody.
    value: of an output, by its parameters and its index.
    """

    name: str
    dtype: type[np.float32] | type[np.int64]
    neutral: float
    value: Callable[[SamplingParams, int], float]


LEAST = float(np.finfo(np.float32).tiny)  # above 0 that float32 has with all its digits, and that no mode takes for 0


def _above_zero(value: float) -> float:
    """A knob as float32 has it whose meaning changes at 0: what is above 0, if only in float64, stays above it."""
    return max(value, LEAST) if value > 0.0 else value


def _signed(value: int) -> int:
    """Of an unsigned number of 64 bits the two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


COLUMNS = (
    Column("temperature", np.float32, 0.0, lambda params, _: _above_zero(params.temperature)),
    Column("top_p", np.float32, 1.0, lambda params, _: _above_zero(params.top_p)),
    Column("min_p", np.float32, 0.0, lambda params, _: params.min_p),
    Column("typical_p", np.float32, 1.0, lambda params, _: _above_zero(params.typical_p)),
    Column("top_k", np.int64, 0, lambda params, _: params.top_k),
    Column("seed", np.int64, 0, lambda params, _: _signed(params.seed)),
    Column("output", np.int64, 0, lambda _, output_index: output_index),
)
FLOATS = tuple(column for column in COLUMNS if column.dtype is np.float32)
INTS = tuple(column for column in COLUMNS if column.dtype is np.int64)


def neutral(columns: tuple[Column, ...], num: int) -> Table:
    """Rows [num, columns] of nobody; columns of one dtype."""
    return np.array([[column.neutral for column in columns]] * num, dtype=columns[0].dtype)


def pack(columns: tuple[Column, ...], owners: Iterable[tuple[SamplingParams, int]]) -> Table:
    """The rows [owners, columns] of outputs; columns of one dtype."""
    rows = [[column.value(params, output_index) for column in columns] for params, output_index in owners]
    return np.array(rows, dtype=columns[0].dtype)


def knob_rows(
    floats: Table,
    ints: Table,
    biases: LogitBiasRows | None = None,
    allowed: AllowedTokenRows | None = None,
    logprobs: LogprobRows | None = None,
) -> SamplingParamRows:
    """Rows of `FLOATS` and of `INTS` column by column, with what further parameters made of them."""
    both = ((FLOATS, floats), (INTS, ints))
    by_name: dict[str, Any] = {
        column.name: values[:, i].copy() for columns, values in both for i, column in enumerate(columns)
    }
    return SamplingParamRows(**by_name, biases=biases, allowed=allowed, logprobs=logprobs)
