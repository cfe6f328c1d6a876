"""Which entry points are found: those that are allowed, each offered once; without a name nothing is looked up."""

import importlib.metadata
from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plugins.entry_points import NO_PLUGINS, find_plugins
from tests.plugins.installed import write_package

TWO = "[sluice.models]\nOddForCausalLM = odd:MODEL\n[sluice.logits_processors]\nupper = odd:Upper\n"


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose import would fail."""
    write_package(tmp_path, "odd", TWO, "raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_nothing_is_looked_up_where_nothing_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(**_: object) -> None:
        pytest.fail("entry points were read")

    monkeypatch.setattr(importlib.metadata, "entry_points", never)
    assert find_plugins("") is NO_PLUGINS and find_plugins(" , ") is NO_PLUGINS


def test_allowed_names_are_found_by_group_and_not_imported(odd: Path) -> None:
    found = find_plugins("upper, OddForCausalLM")
    assert list(found.models) == ["OddForCausalLM"] and list(found.processors) == ["upper"]
    assert str(found.processors["upper"]) == "sluice.logits_processors plugin 'upper' of odd 1.0"
    assert not find_plugins("upper").models


def test_a_name_that_nobody_offers_is_refused_with_those_that_are(odd: Path) -> None:
    with pytest.raises(
        ServiceError, match=r"--plugins: 'lower' is offered by no installed package; installed plugins "
    ):
        find_plugins("upper,lower")
    with pytest.raises(ServiceError, match="'OddForCausalLM', 'upper'"):
        find_plugins("lower")


def test_a_name_that_two_packages_offer_is_refused_with_both(odd: Path) -> None:
    write_package(odd, "even", "[sluice.logits_processors]\nupper = even:Upper\n")
    with pytest.raises(
        ServiceError, match=r"'upper' is offered twice: .* of (odd|even) 1.0, .* of (odd|even) 1.0; unin"
    ):
        find_plugins("upper")
