"""Resizing an engine's cache on request: progress, the end, and what goes on without a caller."""

import asyncio
import dataclasses
from typing import cast

import pytest

from sluice_server.engine.cache_memory import CacheMemory
from sluice_server.engine.errors import ServiceError
from sluice_server.services.engine import cache_operations
from sluice_server.services.engine.cache_operations import CacheOperations
from sluice_server.services.messages.control import CacheResized, ResizeCache


@dataclasses.dataclass
class FakeStore:
    block_bytes: int = 1 << 20


class FakeMemory:
    """A cache with so many blocks in the way."""

    def __init__(self, num_left: int) -> None:
        self.tokens, self.max_tokens, self.host_bytes = 100, 200, 0
        self.num_left = num_left
        self.num_blocks = self.num_host_slots = 0
        self.store = FakeStore()
        self.limits: list[int] = []
        self.is_given_back = False

    def resize(self, tokens: int | None, host_bytes: int | None) -> None:
        self.tokens = self.tokens if tokens is None else tokens

    def advance(self, limit: int) -> int:
        self.limits.append(limit)
        self.num_left = max(0, self.num_left - limit)
        return self.num_left

    def give_back(self) -> int:
        assert not self.num_left
        self.is_given_back = True
        return 4096


def made(num_left: int) -> tuple[CacheOperations, FakeMemory]:
    memory = FakeMemory(num_left)
    return CacheOperations(cast(CacheMemory, memory)), memory


async def test_progress_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_operations, "REPORT_S", 0.0)
    operations, memory = made(10)
    answers = [answer async for answer in operations.resize(ResizeCache(40))]
    assert answers[-1] == CacheResized(40, 200, 0, 0, 4096, is_complete=True)
    assert all(isinstance(one, CacheResized) and not one.is_complete for one in answers[:-1])
    assert set(memory.limits) == {4} and memory.is_given_back  # four MiB between two steps


async def test_it_goes_on_without_its_caller_and_another_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_operations, "REPORT_S", 0.0)
    operations, memory = made(1000)
    answers = operations.resize(ResizeCache(40))
    await anext(answers)
    await answers.aclose()
    with pytest.raises(ServiceError) as caught:
        await anext(operations.resize(ResizeCache(50)))
    assert caught.value.reason == "OPERATION_RUNNING" and memory.tokens == 40
    while operations.is_resizing:
        await asyncio.sleep(0)
    assert memory.is_given_back


async def test_a_cache_of_fixed_size_says_so() -> None:
    with pytest.raises(ServiceError) as caught:
        await anext(CacheOperations(None).resize(ResizeCache(50)))
    assert caught.value.reason == "FEATURE_UNSUPPORTED"
