"""Which ranks belong to one group."""

import dataclasses
from typing import Any

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.parallel.messages import Hello
from sluice_server.services.ranks.membership import check_equal, hello_of, refusal

CONFIG = EngineConfig(dtype="float32", tensor_parallel_size=4)
OTHER = dataclasses.replace(CONFIG, kv_cache_dtype="int8")


def hello(rank: int, config: EngineConfig = CONFIG, **changes: Any) -> Hello:  # noqa: ANN401 # of its fields' types
    return dataclasses.replace(hello_of(config, rank, 7, "1.0", "abc"), **changes)


def test_ranks_of_one_start_belong_together() -> None:
    others = dataclasses.replace(CONFIG, threads=3)  # threads are each rank's own
    assert refusal(hello(0), hello(3, others), {1: None, 2: None}) == ""
    assert refusal(hello(0), hello(1, epoch=0), {}) == ""  # nobody told it the number


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (hello(1, epoch=6), "rank 1 belongs to start 6 of its group, and rank 0 to start 7"),
        (hello(4), "rank 4 is not one of the 4 ranks of the group"),
        (hello(0), "rank 0 is not one of the 4 ranks of the group"),
        (hello(2), "rank 2 came twice: two processes have its id"),
        (hello(1, size=2), "rank 1 has another size of the group, 2; rank 0 has 4"),
        (hello(1, build="1.1"), "rank 1 has another version, 1.1; rank 0 has 1.0"),
        (hello(1, checkpoint="xyz"), "rank 1 has another model's configuration, xyz; rank 0 has abc"),
        (hello(1, OTHER), "rank 1 has --kv-cache-dtype 'int8', and rank 0 'auto'"),
    ],
)
def test_another_opinion_is_named(other: Hello, text: str) -> None:
    assert refusal(hello(0), other, {2: None}) == text


def test_what_was_loaded_must_be_equal() -> None:
    check_equal("layout", "a", {1: "a", 2: "a"})
    with pytest.raises(ServiceError, match="rank 2 has loaded another layout, b; rank 0 has a"):
        check_equal("layout", "a", {1: "a", 2: "b"})
