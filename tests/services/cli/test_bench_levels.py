"""The loads of a sweep: streams are whole numbers; arrival rates may be fractions."""

import pytest
import typer

from sluice_server.services.cli.bench import _levels


def test_arrivals_a_second_may_be_fractions_and_streams_may_not() -> None:
    assert _levels("2,0.5", None, is_rate=True) == [0.5, 2.0]
    assert _levels("2,1", None, is_rate=False) == [1.0, 2.0]
    with pytest.raises(typer.BadParameter, match="part of a stream"):
        _levels("0.5", None, is_rate=False)
