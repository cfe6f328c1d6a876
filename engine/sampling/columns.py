"""Packs those sampling parameters into tables that are columns of numbers (`engine.parameters`).

A row belongs to one output: its parameters and its index. Floats and integers have a table each.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sluice_server.engine import parameters
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling.rows import AllowedTokenRows, LogitBiasRows, LogprobRows, SamplingParamRows

Table: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class SlotColumn(NamedTuple):
    """One sampling parameter as a column.

    Attributes:
        name: as in `SamplingParamRows`.
        neutral: the value in a row without an output.
        value: returns the value of an output, given its parameters and its index.
    """

    name: str
    dtype: type[np.float32] | type[np.int64]
    neutral: float
    value: Callable[[SamplingParams, int], float]


def _of_parameters(value: Callable[[SamplingParams], float]) -> Callable[[SamplingParams, int], float]:
    """Returns the function with an unused output index added."""
    return lambda params, _: value(params)


DTYPES: dict[str, type[np.float32] | type[np.int64]] = {"float32": np.float32, "int64": np.int64}
COLUMNS = (
    *(SlotColumn(one.name, DTYPES[one.dtype], one.neutral, _of_parameters(one.of)) for one in parameters.COLUMNS),
    SlotColumn("output", np.int64, 0, lambda _, output_index: output_index),
)
FLOATS = tuple(column for column in COLUMNS if column.dtype is np.float32)
INTS = tuple(column for column in COLUMNS if column.dtype is np.int64)
_UNSEEDED = tuple(column for column in COLUMNS if column.name != "seed")


def neutral(columns: tuple[SlotColumn, ...], num: int) -> Table:
    """Returns `num` rows without outputs, [num, columns]; columns of one dtype."""
    return np.array([[column.neutral for column in columns]] * num, dtype=columns[0].dtype)


def pack(columns: tuple[SlotColumn, ...], owners: Iterable[tuple[SamplingParams, int]]) -> Table:
    """Returns the rows of outputs, [owners, columns]; columns of one dtype."""
    rows = [[column.value(params, output_index) for column in columns] for params, output_index in owners]
    return np.array(rows, dtype=columns[0].dtype)


def key_of(params: SamplingParams, output_index: int) -> tuple[object, ...]:
    """Returns all that `SamplingParamRows` have of an output. Those of equal keys are equal, apart from seeds by which
    nothing is drawn, as a greedy output has: its seed may be another one for each request."""
    draws = params.temperature > 0 or params.strategy is not None
    numbers = [column.value(params, output_index) for column in (COLUMNS if draws else _UNSEEDED)]
    return (*numbers, params.logprobs, params.logprob_token_ids, params.logit_bias, params.allowed_token_ids)


def sampling_rows(
    floats: Table,
    ints: Table,
    biases: LogitBiasRows | None = None,
    allowed: AllowedTokenRows | None = None,
    logprobs: LogprobRows | None = None,
) -> SamplingParamRows:
    """Returns rows of the tables `FLOATS` and `INTS` as separate columns, with further parameters."""
    both = ((FLOATS, floats), (INTS, ints))
    by_name: dict[str, Any] = {
        column.name: values[:, i].copy() for columns, values in both for i, column in enumerate(columns)
    }
    return SamplingParamRows(**by_name, biases=biases, allowed=allowed, logprobs=logprobs)
