"""Hidden states between stages: what was sent arrives, in pieces too, and no rank waits for one that does not come."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import StageFailed
from sluice_server.engine.parallel.stages_shared import PIECE_FLOATS, SharedMemoryStages, new_stages
from sluice_server.engine.parallel.sums import SumsBroken

TWO = ParallelShape(pipeline_size=2)


def nothing() -> None:
    """Does nothing."""


class Stage:
    """Rank 0 here, and the first of two stages in another process."""

    def __init__(self) -> None:
        self.file = new_stages(TWO)
        program = [sys.executable, "-m", "tests.engine.parallel.stages_process", str(self.file), "1", "2"]
        self.other = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, pass_fds=(self.file,)
        )
        assert self.read() == "ready"
        self.own = SharedMemoryStages(self.file, TWO.of_member(0), 30.0)

    def read(self) -> str:
        assert self.other.stdout is not None
        return self.other.stdout.readline().strip()

    def tell(self, what: str) -> None:
        assert self.other.stdin is not None
        self.other.stdin.write(f"{what}\n")
        self.other.stdin.flush()

    def receive(self) -> torch.Tensor:
        self.own.begin()
        return self.own.receive(3, 4, nothing)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.other.kill()
    made.other.communicate()
    os.close(made.file)


def test_another_process_sends(stage: Stage) -> None:
    stage.tell("send")
    assert torch.equal(stage.receive(), torch.arange(12.0).view(3, 4))


def test_a_rank_that_was_killed_is_named(stage: Stage) -> None:
    stage.other.kill()
    with pytest.raises(SumsBroken, match="rank 1 has ended: start the group anew"):
        stage.receive()


def test_what_a_rank_sent_before_it_ended_counts(stage: Stage) -> None:
    stage.tell("send")
    assert stage.read() == "done"
    stage.other.kill()
    stage.other.wait()
    assert torch.equal(stage.receive(), torch.arange(12.0).view(3, 4))


def test_a_rank_that_is_stopped_is_stuck(stage: Stage) -> None:
    stage.other.send_signal(signal.SIGSTOP)
    stage.own.timeout_s = 0.2
    with pytest.raises(SumsBroken, match=r"rank 1 has not come for 0.2 s, and no rank computes: it is stuck"):
        stage.receive()


def test_a_rank_that_gave_up_is_named(stage: Stage) -> None:
    stage.tell("end")
    with pytest.raises(SumsBroken, match="rank 1 has given up"):
        stage.receive()


def test_a_stage_that_computes_is_not_stuck(stage: Stage) -> None:
    """It is told of here, so that this process shows life too."""
    stage.own.begin()
    seen = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(stage.own.receive, 3, 4, seen.set)
        while not seen.is_set():
            stage.tell("compute")
            assert stage.read() == "done"
        stage.tell("send")
        assert torch.equal(found.result(60), torch.arange(12.0).view(3, 4))


def pair() -> tuple[SharedMemoryStages, SharedMemoryStages]:
    file = new_stages(TWO)
    first, last = (SharedMemoryStages(os.dup(file), TWO.of_member(member), 30.0) for member in (1, 0))
    for one in (first, last):
        one.begin()
    return first, last


@pytest.mark.parametrize("rows", [1, PIECE_FLOATS // 64, PIECE_FLOATS // 16 + 3])
def test_hidden_states_of_any_length(rows: int) -> None:
    first, last = pair()
    sent = torch.randn(rows, 64)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(last.receive, rows, 64, nothing)
        first.send(sent, nothing)
        assert torch.equal(found.result(60), sent)
    assert last.seconds >= 0.0


def test_a_failure_takes_the_place_of_hidden_states() -> None:
    first, last = pair()
    first.settle()
    with pytest.raises(StageFailed, match="a stage before that of rank 0 failed"):
        last.receive(3, 4, nothing)
    last.settle()
    for one in (first, last):
        one.begin()
    first.send(torch.ones(3, 4), nothing)
    first.settle()
    assert torch.equal(last.receive(3, 4, nothing), torch.ones(3, 4))


def test_what_was_not_taken_is_not_taken_for_the_next() -> None:
    first, last = pair()
    for value in range(5):
        first.send(torch.full((3, 4), float(value)), nothing)
        if value % 2:
            assert torch.equal(last.receive(3, 4, nothing), torch.full((3, 4), float(value)))
        last.settle()
        for one in (first, last):
            one.begin()


def test_other_sizes_and_other_launches_end_the_group() -> None:
    first, last = pair()
    first.send(torch.ones(3, 4), nothing)
    with pytest.raises(SumsBroken, match=r"rank 1 sends hidden states \[3, 4\], and rank 0 takes \[2, 4\]"):
        last.receive(2, 4, nothing)
    first, last = pair()
    first.begin()
    first.send(torch.ones(3, 4), nothing)
    with pytest.raises(SumsBroken, match="rank 1 is at launch 2, rank 0 at 1"):
        last.receive(3, 4, nothing)


def test_memory_of_another_group_is_refused() -> None:
    with pytest.raises(ValueError, match="no memory for the stages of this group"):
        SharedMemoryStages(new_stages(TWO), ParallelShape(pipeline_size=3))
