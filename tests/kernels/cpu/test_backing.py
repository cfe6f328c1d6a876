"""Memory is backed by a thread of the lowest priority, keeps its contents, and is left alone once it is dropped."""

import os
import threading
from pathlib import Path

import pytest
import torch

from sluice_server.kernels.cpu import backing, builds, memory
from sluice_server.kernels.cpu.memory import HUGE

needs_thread = pytest.mark.skipif(
    not (backing.IS_ABLE and builds.is_available()), reason="needs Linux 6.4 and kernels built for this machine"
)


def wait_until_backed(tensor: torch.Tensor) -> None:
    """Waits for the memory of a tensor without touching it."""
    first, pause = tensor.data_ptr(), threading.Event()
    for _ in range(2000):
        if backed_bytes(first, first + tensor.numel()) >= tensor.numel():
            return
        pause.wait(0.01)
    raise AssertionError("not backed after 20 s")


def backed_bytes(first: int, end: int) -> int:
    """The bytes that the system has backed of the mappings in a range."""
    found, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0]:
            begin, _, last = head[0].partition("-")
            is_inside = int(begin, 16) < end and first < int(last, 16)
        elif is_inside and head[0] == "Rss:":
            found += int(head[1]) * 1024
    return found


@needs_thread
def test_memory_is_backed_and_its_contents_stay() -> None:
    tensor = memory.zeros(3 * HUGE, torch.uint8)
    tensor[5] = 7
    assert backing.back_later(tensor.data_ptr(), tensor.numel())
    wait_until_backed(tensor)
    assert int(tensor.sum()) == 7


@needs_thread
def test_its_thread_has_the_lowest_priority() -> None:
    tensor = memory.zeros(HUGE, torch.uint8)
    assert backing.back_later(tensor.data_ptr(), tensor.numel())
    wait_until_backed(tensor)
    policies = [os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")]
    assert policies.count(os.SCHED_IDLE) >= 1


@needs_thread
def test_too_many_ranges_are_refused_and_what_is_dropped_is_touched_no_more() -> None:
    tensor = memory.zeros(HUGE, torch.uint8)
    taken = 0
    while taken < 1 << 20 and backing.back_later(tensor.data_ptr(), tensor.numel()):
        taken += 1
    assert taken < 1 << 20, "a thread of the lowest priority keeps up with one that does nothing but ask"
    backing.drop()
    memory.give_back(tensor)
    assert backed_bytes(tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) < HUGE
    assert backing.back_later(tensor.data_ptr(), tensor.numel())
    wait_until_backed(tensor)


@needs_thread
def test_a_forked_process_has_a_thread_of_its_own() -> None:
    tensor = memory.zeros(HUGE, torch.uint8)
    assert backing.back_later(tensor.data_ptr(), tensor.numel())
    child = os.fork()
    if child == 0:
        try:
            backing.drop()
            own = memory.zeros(HUGE, torch.uint8)
            backing.back_later(own.data_ptr(), own.numel())
            wait_until_backed(own)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("platform", "release", "able"),
    [
        ("linux", "6.4.0", True),
        ("linux", "6.18.44-fc-v657", True),
        ("linux", "7.0", True),
        ("linux", "6.3.9", False),
        ("linux", "5.15.0-1-generic", False),
        ("linux", "unknown", False),
        ("darwin", "24.1.0", False),
    ],
)
def test_only_systems_whose_page_faults_lock_one_mapping_are_able(platform: str, release: str, able: bool) -> None:
    assert backing.is_able(platform, release) is able


def test_without_our_kernels_nothing_is_backed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "MODULE", None)
    assert not backing.back_later(0, HUGE)
    backing.drop()


def test_a_system_that_is_not_able_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "IS_ABLE", False)
    assert not backing.back_later(0, HUGE)
