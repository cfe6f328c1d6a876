"""Sums over shared memory: order, pieces, and ranks that end, are stopped or give something else."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from sluice_server.engine.parallel.sums import LocalSums, SumsBroken
from sluice_server.engine.parallel.sums_shared import SharedMemorySums, new_segment
from sluice_server.kernels.cpu import builds
from tests.engine.parallel import sums_process
from tests.engine.parallel.test_sums import SHAPE, added, in_order, uneven

Result = TypeVar("Result")
pytestmark = pytest.mark.skipif(not builds.is_available(), reason="installed without a C++ compiler")
PATIENT_S = 60.0


@pytest.fixture(autouse=True)
def one_thread() -> None:
    builds.set_threads(1)  # the kernels' pool serves one caller at a time if it has more


def group(
    size: int, shards: int = 0, slot_floats: int = 1 << 12, timeout_s: float = PATIENT_S
) -> list[SharedMemorySums]:
    """Ranks that are threads of this process, over real memory."""
    file = new_segment(size, slot_floats)
    return [SharedMemorySums(file, rank, shards, timeout_s) for rank in range(size)]


def of_each(each: Sequence[SharedMemorySums], work: Callable[[SharedMemorySums], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(each)) as pool:
        return list(pool.map(work, each))


@pytest.mark.parametrize("slot_floats", [1 << 12, 6 * 165, 100, 37])
@pytest.mark.parametrize(("size", "shards"), [(1, 6), (2, 6), (3, 6), (6, 6), (3, 3)])
def test_the_bits_are_those_of_one_rank_with_all_shards(size: int, shards: int, slot_floats: int) -> None:
    """In one piece, in one that fits exactly, and in several with a rest."""
    given, start = uneven(shards), uneven(1, seed=1)[0]
    each = group(size, shards, slot_floats)
    for seed in range(4):  # slots are filled in turn
        wanted = added(LocalSums(shards), given, start)
        for found in of_each(each, lambda sums, given=given: added(sums, given, start)):  # type: ignore[misc]
            assert torch.equal(found, wanted) and torch.equal(found, in_order(given, start))
        given = uneven(shards, seed + 10)
    assert all(sums.seconds > 0 for sums in each)


@pytest.mark.parametrize(("agrees", "is_apart"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("slot_floats", [1 << 12, 100])
def test_partial_sums_may_be_written_where_the_others_read(slot_floats: int, agrees: bool, is_apart: bool) -> None:
    given, start = uneven(6), uneven(1, seed=1)[0]

    def work(sums: SharedMemorySums) -> torch.Tensor:
        into = torch.stack([start, start], 2)[..., 0] if is_apart else start.clone()
        for _ in range(3):
            room = sums.room(*SHAPE)
            for one, value in zip(room, given[sums.rank * 2 :], strict=False):
                one.copy_(value)
            assert not agrees or sums.agree(True)  # what is in the room stays while something else is exchanged
            sums.add(into, room)
        return into

    wanted = in_order(given, in_order(given, in_order(given, start)))
    assert all(torch.equal(found, wanted) for found in of_each(group(3, 6, slot_floats), work))


def test_a_sum_may_go_into_rows_that_are_apart() -> None:
    def work(sums: SharedMemorySums) -> torch.Tensor:
        wide = torch.zeros(SHAPE[0], 2 * SHAPE[1])
        sums.add(wide[:, ::2], [torch.ones(SHAPE)])
        return wide

    for found in of_each(group(2), work):
        assert torch.equal(found[:, ::2], torch.full(SHAPE, 2.0)) and not found[:, 1::2].any()


@pytest.mark.parametrize("slot_floats", [1 << 12, 40, 7])
def test_columns_are_gathered_at_rank_0(slot_floats: int) -> None:
    parts = [torch.randn(6, width) for width in (13, 1, 20)]
    for _ in range(2):
        found, *others = of_each(group(3, 3, slot_floats), lambda sums: sums.gather(parts[sums.rank], 34))
        assert found is not None and torch.equal(found, torch.cat(parts, 1)) and others == [None, None]


def test_a_rank_may_have_as_many_columns_of_two_vocabularies_while_another_has_not() -> None:
    """As of a model's and a smaller one's that drafts for it."""
    wholes = [torch.randn(2, size) for size in (10, 9, 10)]

    def work(sums: SharedMemorySums) -> list[torch.Tensor | None]:
        return [sums.gather(whole[:, :5] if sums.rank == 0 else whole[:, 5:], whole.shape[1]) for whole in wholes]

    found, _ = of_each(group(2), work)
    assert all(one is not None and torch.equal(one, whole) for one, whole in zip(found, wholes, strict=True))


@pytest.mark.parametrize("unwell", [None, 0, 2])
def test_ranks_agree_whether_all_are_well(unwell: int | None) -> None:
    assert of_each(group(3), lambda sums: sums.agree(sums.rank != unwell)) == [unwell is None] * 3


SIZES: dict[str, Callable[[SharedMemorySums], object]] = {
    "rows": lambda sums: sums.add(torch.zeros(2 + sums.rank, 3), [torch.zeros(2 + sums.rank, 3)]),
    "number": lambda sums: sums.add(torch.zeros(2, 3), [torch.zeros(2, 3)] * (1 + sums.rank)),
    "gathered rows": lambda sums: sums.gather(torch.zeros(1 + sums.rank, 3), 6),
}


@pytest.mark.parametrize("name", ["rows", "number", "gathered rows"])
def test_ranks_must_give_the_same_sizes(name: str) -> None:
    def work(sums: SharedMemorySums) -> None:
        with pytest.raises(SumsBroken, match=r"rank 1 of 2 (gives other sizes|has given up)"):
            SIZES[name](sums)

    of_each(group(2), work)


@pytest.mark.parametrize(
    ("into", "part"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)),
    ],
)
def test_what_does_not_fit_is_refused_before_a_rank_waits(into: torch.Tensor, part: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a sum of"):
        group(2)[0].add(into, [part])


def test_a_rank_that_does_not_come_is_given_up_and_the_others_are_told() -> None:
    each = group(3, timeout_s=0.05)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(added, sums, uneven(3), torch.zeros(SHAPE)) for sums in each[::2]]
        for one in waiting:
            with pytest.raises(SumsBroken, match=r"rank 1 of 3 (did not come to a sum within|has given up)") as caught:
                one.result()
            assert caught.value.rank == 1


def test_a_rank_that_gives_up_ends_the_wait_of_the_others() -> None:
    each = group(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(each[0].agree, True)
        each[1].end()
        with pytest.raises(SumsBroken, match="rank 1 of 2 has given up"):
            waiting.result()


def test_a_file_that_is_no_segment_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file, pytest.raises(ValueError, match="no memory for the sums of ranks"):
        SharedMemorySums(file.fileno(), 0)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        SharedMemorySums(new_segment(2), 2)
    with pytest.raises(ValueError, match="3 shards cannot be shared out among 2 ranks"):
        SharedMemorySums(new_segment(2), 0, 3)


def test_nobody_can_shrink_the_memory_of_others() -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(new_segment(2), 0)


class Process:
    """A rank that is a process; see `sums_process`."""

    def __init__(self, file: int, rank: int, timeout_s: float = PATIENT_S) -> None:
        command = [sys.executable, "-m", "tests.engine.parallel.sums_process", str(file), str(rank), str(timeout_s)]
        self._process = subprocess.Popen(
            command, pass_fds=[file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.send = self._process.send_signal

    def begin(self) -> None:
        """Has it begin a sum."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)

    def said(self) -> str:
        """The next line that it says; empty at its end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        """Ends it, in whatever state it is."""
        with self._process:
            self._process.kill()


@pytest.fixture
def processes() -> Iterator[Callable[[int, float], tuple[SharedMemorySums, list[Process]]]]:
    """Makes groups of so many ranks: rank 0 in this process, others in their own."""
    started: list[Process] = []

    def make(size: int, timeout_s: float) -> tuple[SharedMemorySums, list[Process]]:
        file = new_segment(size)
        own = SharedMemorySums(file, 0, timeout_s=timeout_s)
        started.extend(Process(file, rank) for rank in range(1, size))
        assert all(one.said() == "ready" for one in started)
        return own, list(started)

    yield make
    for one in started:
        one.end()


Make = Callable[[int, float], tuple[SharedMemorySums, list[Process]]]


def add(own: SharedMemorySums, others: Sequence[Process], at: int) -> torch.Tensor:
    """The result of this process's rank, with those that are told to add."""
    for one in others:
        one.begin()
    into = torch.ones(sums_process.SHAPE)
    own.add(into, [sums_process.numbers(0, at)])
    return into


def test_processes_get_the_same_bits(processes: Make) -> None:
    own, others = processes(3, PATIENT_S)
    for at in range(5):
        found = add(own, others, at)
        wanted = in_order([sums_process.numbers(rank, at) for rank in range(3)], torch.ones(sums_process.SHAPE))
        assert torch.equal(found, wanted)
        assert [one.said() for one in others] == [float(wanted.double().sum()).hex()] * 2


@pytest.mark.parametrize("waits", [False, True], ids=["between sums", "within a sum"])
def test_a_killed_rank_ends_the_sums_of_all(processes: Make, waits: bool) -> None:
    """It dies between two sums, or waits in one for the others, who may still complete that one."""
    own, (victim, witness) = processes(3, PATIENT_S)
    add(own, (victim, witness), 0)
    assert victim.said() == witness.said() != ""
    if waits:
        victim.begin()
        while own._segment._memory.view(torch.int64)[8 * 2].item() < 2:  # the line of rank 1: what it has written
            pass
    victim.send(signal.SIGKILL)
    assert victim.said() == ""

    def go_on() -> None:
        for at in (1, 2):
            add(own, (witness,), at)

    with pytest.raises(SumsBroken, match="rank 1 of 3 has ended") as caught:
        go_on()
    assert caught.value.rank == 1
    said = witness.said()
    if "broken" not in said:  # it had what it needed for its sum
        witness.begin()
        said = witness.said()
    assert said == "broken 1"
    with pytest.raises(SumsBroken, match="rank 1 of 3"):  # a broken group stays broken
        own.agree(True)


def test_a_stopped_rank_is_given_up_after_the_limit(processes: Make) -> None:
    own, (victim, witness) = processes(3, PATIENT_S)
    add(own, (victim, witness), 0)
    victim.send(signal.SIGSTOP)
    own.timeout_s = 0.2
    with pytest.raises(SumsBroken, match=r"rank 1 of 3 did not come to a sum within 0\.2 s; it is stuck"):
        add(own, (victim, witness), 1)
    assert witness.said() != "" and witness.said() == "broken 1"  # its patience is longer: it was told


def test_a_rank_is_there_once(processes: Make) -> None:
    own, _ = processes(2, PATIENT_S)
    with pytest.raises(ValueError, match="rank 1 of this group is there already, in another process"):
        SharedMemorySums(own._file, 1)
