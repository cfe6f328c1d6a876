import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from sluice_server.engine.checks import check_params
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.parameter_kinds import Biases, Flag, Ids, Number, Parameter
from sluice_server.engine.parameters import COLUMNS, FROM_MODEL, NUMBERS, PARAMETERS
from sluice_server.engine.request import Limits, SamplingParams

LIMITS = Limits(context_length=100, vocab_size=1000)
EXTRA: dict[str, Any] = {"logprob_token_ids": {"logprobs": 0}, "length_penalty": {"beam_width": 2}}  # what it needs


def refused(**values: Any) -> tuple[str, str]:  # noqa: ANN401 # any parameter's
    """Field and message of the error, or "" if the value is accepted."""
    try:
        check_params(SamplingParams(**values), LIMITS)
    except ServiceError as error:
        assert error.code == Code.INVALID_ARGUMENT
        return error.field, error.message
    return "", ""


def example(row: Parameter) -> object:
    """A valid value other than the neutral one."""
    match row:
        case Number():
            low, high = row.bounds(SamplingParams(), LIMITS)
            return next(one for one in (high, low) if one != row.neutral)
        case Flag():
            return True
        case Ids():
            return (3, 5)
        case Biases():
            return ((3, 0.5),)


def test_every_parameter_has_one_row() -> None:
    names = [row.name for row in PARAMETERS]
    assert len(set(names)) == len(names)
    assert {*names, "grammar", "bad_words", "logits_processors", "strategy"} == {
        field.name for field in dataclasses.fields(SamplingParams)
    }
    assert len({row.field for row in PARAMETERS}) == len(names)


@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row.name)
def test_a_row_reads_the_parameter_that_it_names(row: Parameter) -> None:
    value = example(row)
    assert row.of(SamplingParams(**{row.name: value})) == value  # type: ignore[arg-type] # of the row's own type
    assert row.of(SamplingParams()) != value


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: row.name)
def test_a_number_is_refused_by_its_name_value_and_range(row: Number) -> None:
    low, high = row.bounds(SamplingParams(), LIMITS)
    others = EXTRA.get(row.name, {})
    above = high + 1 if row.type is int else math.nextafter(high, math.inf)
    assert refused(**{**others, row.name: high})[0] in ("", "min_tokens")  # which goes with a max_tokens
    field, message = refused(**{**others, row.name: above})
    assert field == (row.said or row.name)
    assert message == f"{field}: {above} is not in " + (f"({low:g}, {high:g}]" if row.is_above else f"[{low}, {high}]")
    below = low if row.is_above else low - 1
    if below != row.off:
        assert refused(**{**others, row.name: below})[0] == field
    if row.type is float:
        assert refused(**{**others, row.name: math.nan})[0] == field


def test_what_a_model_may_say() -> None:
    """The fields of generation_config.json that transformers and vLLM read; max tokens come from the request."""
    assert [row.name for row in FROM_MODEL] == [
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    ]


def test_columns_hold_what_they_are_of() -> None:
    params = SamplingParams(temperature=1e-300, top_k=5, top_p=1e-300, min_p=0.25, typical_p=0.5, seed=2**64 - 1)
    kept = {one.name: np.array([one.of(params)], dtype=one.dtype)[0] for one in COLUMNS}
    assert kept["temperature"] == kept["top_p"] == np.finfo(np.float32).tiny
    assert (kept["top_k"], kept["min_p"], kept["typical_p"], kept["seed"]) == (5, 0.25, 0.5, -1)
    assert {one.name: one.of(SamplingParams()) for one in COLUMNS} == {one.name: one.neutral for one in COLUMNS}


@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row.name)
def test_what_is_not_set_is_in_range_under_the_tightest_limits(row: Parameter) -> None:
    """So it need not be checked."""
    least = {
        "max_logprobs": 0,
        "max_outputs": 1,
        "max_beam_width": 2,
        "max_logit_biases": 0,
        "max_allowed_token_ids": 0,
    }
    most = {"max_temperature": 1.0, "max_penalty": 0.0, "max_repetition_penalty": 1.0, "max_length_penalty": 1.0}
    row.check(SamplingParams(), Limits(1, 1, **least, **most, min_repetition_penalty=1.0))  # type: ignore[arg-type] # numbers
