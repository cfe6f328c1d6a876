"""The size of the cache that an engine is built with."""

import dataclasses
import os

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import Limits
from sluice_server.engine.worker.startup import allocation
from sluice_server.engine.worker.startup.allocation import cache_blocks

TOKEN_BYTES = 1024
LIMITS = Limits(context_length=4096, vocab_size=100)
ALL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // TOKEN_BYTES


def blocks(tokens: int, gpu_cache_bytes: int | None = None) -> int:
    return cache_blocks(
        EngineConfig(kv_cache_tokens=tokens, block_size=16).sized("cpu"), TOKEN_BYTES, LIMITS, gpu_cache_bytes
    )


def test_it_is_as_large_as_asked_for_if_that_can_be() -> None:
    assert blocks(1600) == 100
    assert blocks(1600, gpu_cache_bytes=1600 * TOKEN_BYTES) == 100


@pytest.mark.parametrize(
    ("tokens", "gpu_cache_bytes", "said"),
    [
        (16 * ALL, None, f"{16 * ALL} tokens need {16 * ALL >> 10} MiB; {ALL} tokens fit"),
        (1616, 1600 * TOKEN_BYTES, "1616 tokens need 1 MiB; 1600 tokens fit"),
        (15, None, "15 tokens are less than one block of 16"),
    ],
)
def test_one_that_cannot_be_is_refused_and_names_the_flag(tokens: int, gpu_cache_bytes: int | None, said: str) -> None:
    with pytest.raises(ServiceError, match=f"--kv-cache-tokens: {said}"):
        blocks(tokens, gpu_cache_bytes)


def test_what_adapters_may_take_is_not_given_to_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "machine_memory", lambda _: 100 << 20)
    limits = Limits(context_length=1 << 20, vocab_size=100)
    plain = EngineConfig(block_size=16).sized("cpu")
    assert cache_blocks(plain, TOKEN_BYTES, limits, None) == (25 << 10) // 16
    budgets = dataclasses.replace(plain, adapter_bytes=40 << 20, adapter_host_bytes=60 << 20)
    assert cache_blocks(budgets, TOKEN_BYTES, limits, None) == (25 << 10) // 16  # requests name none
    assert cache_blocks(dataclasses.replace(budgets, max_adapters=4), TOKEN_BYTES, limits, None) == (10 << 10) // 16
    too_much = dataclasses.replace(plain, max_adapters=4, adapter_host_bytes=1 << 30)
    with pytest.raises(ServiceError, match="--adapter-host-bytes: 1024 MiB of adapters leave no"):
        cache_blocks(too_much, TOKEN_BYTES, limits, None)
    assert cache_blocks(dataclasses.replace(too_much, kv_cache_tokens=160), TOKEN_BYTES, limits, None) == 10


def test_without_a_wish_it_takes_a_share_of_what_is_free_and_no_more_than_can_be_used() -> None:
    assert 0 < blocks(0) <= EngineConfig().sized("cpu").max_num_seqs * LIMITS.context_length // 16
    assert blocks(0, gpu_cache_bytes=320 * TOKEN_BYTES) == 20
