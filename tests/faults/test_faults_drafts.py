"""Drafts in a whole service: clients receive what a service that drafts nothing gives, stop strings and all, and while
processes are killed."""

from collections.abc import Iterator

import pytest

from benchmarks.streams import Received, at_phase, stream_all
from tests.faults.test_faults_kill import NUM_STREAMS, OPTIONS, SPECS, check_undisturbed, kill
from tests.system.service import Service, serve

pytestmark = pytest.mark.long
DRAFTING = ("--speculation", "draft", "--draft-model", "demo", "--draft-length", "fixed")


@pytest.fixture(scope="module")
def plain() -> list[Received]:
    with serve(*OPTIONS) as service:
        answers = stream_all(service.address, SPECS)
    assert [answer.error for answer in answers] == [""] * NUM_STREAMS
    return answers


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve(*OPTIONS, *DRAFTING) as running:
        yield running


def test_answers_are_those_of_a_service_that_drafts_nothing(service: Service, plain: list[Received]) -> None:
    check_undisturbed(stream_all(service.address, SPECS), plain)


@pytest.mark.parametrize("role", ["engine", "detokenizer", "gateway"])
@pytest.mark.parametrize("seed", [0, 1])
def test_drafting_streams_survive_a_death(service: Service, plain: list[Received], role: str, seed: int) -> None:
    answers = stream_all(service.address, SPECS, at_phase("decode", seed, kill(service, role)))
    check_undisturbed(answers, plain)
