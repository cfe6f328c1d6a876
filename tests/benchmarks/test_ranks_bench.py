"""The benchmark of ranks: engines of one process share its threads, so each is timed with its own number of them."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from benchmarks.ranks import Load
from sluice_server.engine.engine import Engine
from sluice_server.engine.request import EngineRequest
from sluice_server.engine.worker.host.compute_threads import use_threads


class CountedEngine:
    """Ends a request with each step, and notes how many threads would compute it."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._waiting: list[EngineRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, request: EngineRequest) -> None:
        self._waiting.append(request)

    def step(self) -> SimpleNamespace:
        self.seen.append(torch.get_num_threads())
        request = self._waiting.pop()
        tokens = tuple(range(request.params.max_tokens))
        return SimpleNamespace(sampled=[SimpleNamespace(request_id=request.request_id, token_ids=tokens)])


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    use_threads(before)


@pytest.mark.usefixtures("threads")
def test_each_way_computes_with_its_own_threads() -> None:
    engines = {num: CountedEngine() for num in (1, 2, 3)}
    loads = {num: Load(cast("Engine", engine), num) for num, engine in engines.items()}
    for load in (*loads.values(), *loads.values()):
        load.prompt()
    assert {num: engine.seen for num, engine in engines.items()} == {num: [num, num] for num in engines}
