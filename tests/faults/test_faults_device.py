"""Faults during computation: a bug in one request's rows, a device out of memory, a lost device."""

from pathlib import Path

import pytest
from sluice.v1 import inference_pb2

from benchmarks.streams import Received, stream_all, varied
from tests.faults.faulty import faults
from tests.system.service import serve, spec

OPTIONS = ("--dtype", "float32", "--max-num-batched-tokens", "128")
SPECS = varied(8, 32)
RARE = 4001  # an id that no answer has


@pytest.fixture(scope="module")
def undisturbed() -> list[Received]:
    with serve(*OPTIONS) as service:
        answers = stream_all(service.address, SPECS)
    assert [answer.error for answer in answers] == [""] * len(SPECS)
    return answers


def test_a_request_whose_computation_fails_fails_alone(undisturbed: list[Received]) -> None:
    with serve(*OPTIONS, environment=faults(row_error=RARE)) as service:
        answers = stream_all(service.address, [*SPECS, spec([5, 6, RARE], 8)])
        assert answers[-1].error.startswith("INTERNAL: the engine failed while computing this request")
        assert [one.answer for one in answers[:-1]] == [one.answer for one in undisturbed]
        assert [one.answer for one in stream_all(service.address, SPECS[:2])] == [one.answer for one in undisturbed[:2]]


@pytest.mark.parametrize("most", [3, pytest.param(100, marks=pytest.mark.long)])
def test_a_device_without_memory_takes_smaller_steps(most: int, undisturbed: list[Received]) -> None:
    with serve(*OPTIONS, environment=faults(out_of_memory=most)) as service:
        answers = stream_all(service.address, SPECS)
        assert [one.answer for one in answers] == [one.answer for one in undisturbed]


def test_streams_survive_the_loss_of_the_device(tmp_path: Path, undisturbed: list[Received]) -> None:
    marker = tmp_path / "lost"
    with serve(*OPTIONS, environment=faults(device_lost=str(marker))) as service:
        answers = stream_all(service.address, SPECS)
        assert marker.exists()
        assert [one.answer for one in answers] == [one.answer for one in undisturbed]


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    """CVE-2024-50050 and its whole family."""
    report = tmp_path / "unpickled"
    with serve(environment=faults(no_pickle=str(report))) as service, service.stub() as stub:
        assert [one.error for one in stream_all(service.address, varied(6, 8))] == [""] * 6
        tokens = stub.Tokenize(inference_pb2.TokenizeRequest(text="some words")).tokens
        ids = [token.id for token in tokens]
        assert stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids)).text == "some words"
    assert not report.exists(), report.read_text()
