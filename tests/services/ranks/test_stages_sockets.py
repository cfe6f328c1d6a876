"""Hidden states between hosts: pieces, failures in their place, progress, and ranks that do not come."""

from collections import deque
from collections.abc import Callable
from typing import cast

import pytest
import torch

from sluice_server.engine.errors import RankLost
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages import StageFailed
from sluice_server.engine.parallel.sums import SumsBroken
from sluice_server.services.ranks import stages_sockets
from sluice_server.services.ranks.sockets import RankSockets
from sluice_server.services.ranks.stages_sockets import SocketStages

IDS = ("engine-0", "worker-0-1", "worker-0-2")


class Wires:
    """The sockets of three ranks that are stages: what is sent to one waits for it."""

    def __init__(self) -> None:
        self.sent: dict[str, deque[bytes]] = {name: deque() for name in IDS}
        self.lost = ""

    def of(self, name: str) -> RankSockets:
        class Own:
            def send_states(_, to: str, data: bytes) -> None:
                self.sent[to].append(data)

            def receive_states(_, timeout_s: float) -> bytes | None:
                if not self.sent[name] and self.lost:
                    raise RankLost(self.lost)
                return self.sent[name].popleft() if self.sent[name] else None

        return cast("RankSockets", Own())


class Line:
    """Three stages; rank 0 is the last one."""

    def __init__(self) -> None:
        self.wires = Wires()
        shape = ParallelShape(pipeline_size=3)
        self.ranks = [SocketStages(self.wires.of(name), shape.of_member(at), IDS, 0.0) for at, name in enumerate(IDS)]
        self.last, self.middle, self.first = self.ranks
        self.begin()

    def begin(self) -> None:
        for rank in self.ranks:
            rank.begin()


@pytest.fixture
def line() -> Line:
    return Line()


def no() -> None:
    """Does nothing about progress."""


@pytest.mark.parametrize("floats", [1 << 20, 7])
def test_states_come_as_they_were_sent(line: Line, monkeypatch: pytest.MonkeyPatch, floats: int) -> None:
    monkeypatch.setattr(stages_sockets, "PIECE_FLOATS", floats)
    states = torch.randn(5, 3)
    line.first.send(states, no)
    assert torch.equal(line.middle.receive(5, 3, no), states)
    line.middle.send(states * 2, no)
    assert torch.equal(line.last.receive(5, 3, no), states * 2)
    assert line.last.seconds > 0


def test_a_failure_comes_in_the_place_of_states_and_the_next_launch_is_whole(line: Line) -> None:
    line.first.settle()
    with pytest.raises(StageFailed, match="rank 2 could not compute launch 1"):
        line.middle.receive(2, 2, no)
    line.middle.settle()
    with pytest.raises(StageFailed):
        line.last.receive(2, 2, no)
    line.begin()
    states = torch.randn(2, 2)
    line.first.send(states, no)
    line.first.settle()
    assert torch.equal(line.middle.receive(2, 2, no), states) and not line.wires.sent["worker-0-1"]


def test_what_a_stage_did_not_take_is_not_taken_in_the_next_launch(line: Line) -> None:
    line.first.send(torch.ones(2, 2), no)
    line.middle.settle()  # it failed before it took them
    line.begin()
    line.first.send(torch.zeros(2, 2), no)
    assert not line.middle.receive(2, 2, no).any()


def test_progress_of_an_early_stage_reaches_the_last_one(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_sockets, "PROGRESS_S", 0.0)
    heard: list[str] = []

    def then(send: Callable[[], None], name: str) -> Callable[[], None]:
        def on_progress() -> None:
            heard.append(name)
            send()

        return on_progress

    line.first.note_progress()
    line.middle.receive(1, 1, then(lambda: line.first.send(torch.ones(1, 1), no), "middle"))
    assert line.wires.sent["engine-0"]
    line.last.receive(1, 1, then(lambda: line.middle.send(torch.ones(1, 1), no), "last"))
    assert heard == ["middle", "last"]


def test_progress_is_not_told_each_time(line: Line) -> None:
    for _ in range(9):
        line.first.note_progress()
    assert len(line.wires.sent["worker-0-1"]) == 1
    line.last.note_progress()  # the last stage tells no other


def test_an_early_stage_that_does_not_come_is_stuck(line: Line) -> None:
    with pytest.raises(SumsBroken, match="rank 1 has not come for 0 s, and no earlier stage computes: it is stuck"):
        line.last.receive(1, 1, no)


def test_the_loss_of_a_rank_ends_the_wait(line: Line) -> None:
    line.wires.lost = "engine-0 has ended"
    with pytest.raises(SumsBroken, match="engine-0 has ended: start the group anew"):
        line.middle.receive(1, 1, no)


def test_states_of_another_size_or_launch_end_the_group(line: Line) -> None:
    line.first.send(torch.ones(2, 3), no)
    with pytest.raises(SumsBroken, match=r"rank 2 sends hidden states \[2, 3\] from 0, not \[3, 2\] from 0"):
        line.middle.receive(3, 2, no)
    line.first.begin()
    line.first.send(torch.ones(1, 1), no)
    with pytest.raises(SumsBroken, match="rank 2 is at launch 2, this rank at 1"):
        line.middle.receive(1, 1, no)
    line.wires.sent["worker-0-1"].append(b"abc")
    with pytest.raises(SumsBroken, match="rank 2 sends 3 bytes that are no hidden states"):
        line.middle.receive(1, 1, no)
