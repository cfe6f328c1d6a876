"""Memory of the cache is taken from the system before the first use of its blocks, and no more than that needs."""

import threading
from pathlib import Path

import pytest
import torch

from sluice_server.engine import build
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.host.pages import PagesAhead, populate
from sluice_server.kernels.cpu import memory
from sluice_server.kernels.cpu.memory import HUGE
from tests.oracle.checkpoints import Shape, make_checkpoint

BLOCK = HUGE // 8  # bytes


class System:
    """A system that backs memory, and says when a number of bytes is reached. It refuses from `most` on."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.calls: list[tuple[int, int]] = []
        self.changed = threading.Condition()
        self.most = most

    def __call__(self, address: int, size: int) -> bool:
        with self.changed:
            self.calls.append((address, size))
            self.changed.notify()
            return self.num_bytes <= self.most

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.calls)

    def wait(self, num_bytes: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_bytes >= num_bytes, 20)


def refuse(address: int, size: int) -> bool:
    """A system that has no processor to spare."""
    return False


class Unthreaded(PagesAhead):
    """Backs memory when a test calls `_advance`."""

    def _serve(self) -> None:
        """Leaves it to the test."""


def cache(num_blocks: int = 64) -> torch.Tensor:
    return memory.zeros(num_blocks * BLOCK, torch.uint8).view(num_blocks, BLOCK)


def test_the_next_large_page_is_backed_in_each_tensor_once_a_quarter_of_one_is_used() -> None:
    system, small = System(), cache()
    large = memory.zeros(16 * HUGE, torch.uint8).view(16, HUGE)  # comes second: what it needs tells that both are done
    pages = PagesAhead([small, large], system, refuse)
    for num_blocks, num_pages in ((0, 1), (2, 1), (3, 2), (10, 2), (11, 3)):
        pages.reach(num_blocks)
        system.wait((num_pages + num_blocks + 1) * HUGE)
        of_small = [call for call in system.calls if call[0] - small.data_ptr() in range(small.numel())]
        assert of_small == [(small.data_ptr() + page * HUGE, HUGE) for page in range(num_pages)]
    pages.close()
    assert sorted(set(system.calls) - set(of_small)) == [(large.data_ptr() + page * HUGE, HUGE) for page in range(12)]


def test_pages_wait_for_an_idle_processor_until_three_quarters_of_a_page_are_left() -> None:
    system, idle, tensor = System(), System(), cache()
    pages = Unthreaded([tensor], system, idle)
    for num_blocks, num_idle, num_urgent in ((0, 0, 1), (1, 0, 1), (2, 1, 1), (3, 1, 2), (10, 2, 2), (11, 2, 3)):
        assert pages._advance(num_blocks)
        assert (len(idle.calls), len(system.calls)) == (num_idle, num_urgent)
    pages.close()
    of_pages = [(tensor.data_ptr() + page * HUGE, HUGE) for page in range(3)]
    assert (system.calls, idle.calls) == (of_pages, of_pages[1:])


def test_a_page_that_cannot_wait_is_backed_all_the_same() -> None:
    system, idle = System(), System(most=0)
    pages = Unthreaded([cache()], system, idle)
    assert pages._advance(2) and pages._advance(3)
    pages.close()
    assert (len(idle.calls), len(system.calls)) == (1, 2)


def test_no_memory_beyond_the_cache_is_touched() -> None:
    system, tensor = System(), cache(20)
    pages = PagesAhead([tensor], system, refuse)
    pages.reach(20)
    system.wait(20 * BLOCK)
    pages.reach(21)
    pages.close()
    assert system.num_bytes == 20 * BLOCK
    assert max(address + size for address, size in system.calls) == tensor.data_ptr() + 20 * BLOCK


def test_no_memory_behind_the_blocks_that_may_be_used_is_touched_until_more_may_be() -> None:
    system, tensor = System(), cache()
    pages = PagesAhead([tensor], system, refuse)
    system.wait(HUGE)
    pages.resize(12)
    pages.reach(12)
    system.wait(12 * BLOCK)
    pages.resize(64)
    pages.reach(13)
    system.wait(3 * HUGE)
    pages.close()
    ends = [address + size - tensor.data_ptr() for address, size in system.calls]
    assert ends == [HUGE, 12 * BLOCK, 2 * HUGE, 3 * HUGE]


def test_what_is_given_back_is_backed_again_before_its_use() -> None:
    system, tensor = System(), cache(16)
    pages = PagesAhead([tensor], system, refuse)
    pages.reach(16)
    system.wait(2 * HUGE)
    pages.resize(8)
    pages.resize(16)
    pages.reach(8)
    system.wait(3 * HUGE)
    pages.close()
    assert system.calls[-1] == (tensor.data_ptr() + HUGE, HUGE)


def test_a_system_that_refuses_is_asked_once() -> None:
    system = System(most=0)
    pages = PagesAhead([cache(), cache()], system, refuse)
    pages.reach(1)
    pages._thread.join(20)
    pages.reach(60)
    pages.close()
    assert len(system.calls) == 1


def test_a_small_cache_is_left_alone() -> None:
    system = System()
    pages = PagesAhead([torch.zeros(4, 16)], system, refuse)
    pages.reach(4)
    pages.close()
    assert not system.calls


def test_contents_stay_as_they_are() -> None:
    tensor = cache(16)
    tensor[3] = 7
    populate(tensor.data_ptr(), 2 * HUGE)
    assert bool((tensor[3] == 7).all()) and int(tensor.sum()) == 7 * BLOCK


def test_an_engine_tells_before_a_step_how_many_blocks_it_has_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    class Told(PagesAhead):
        def reach(self, num_blocks: int) -> None:
            told.append(num_blocks)

    monkeypatch.setattr(build, "PagesAhead", Told)
    config = EngineConfig(device="cpu", dtype="float32", block_size=8, kv_cache_tokens=64, threads=1)
    model = read_config(make_checkpoint(tmp_path, Shape()))
    built = build.build_engine(config, model, tmp_path, limits_of(config, model, 1 << 20))
    try:
        built.engine.add(EngineRequest("a", tuple(range(1, 20)), SamplingParams(max_tokens=8, ignore_eos=True)))
        while built.engine.has_work:
            built.engine.step()
    finally:
        built.close()
    assert told[0] == 3 and told[-1] == 4
