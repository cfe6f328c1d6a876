"""The benchmark of ranks: engines of one process share its threads, so each is timed with its own number of them. What
ranks of more cores would do follows from three measurements."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from benchmarks.ranks import PART, TOKENS, Load, forecast, show
from sluice_server.engine.engine import Engine
from sluice_server.engine.request import EngineRequest
from sluice_server.engine.worker.host.compute_threads import use_threads


class CountedEngine:
    """Samples a token of every request with each step, and notes how many threads would compute it."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._left: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: EngineRequest) -> None:
        self._left[request.request_id] = request.params.max_tokens

    def step(self) -> SimpleNamespace:
        self.seen.append(torch.get_num_threads())
        sampled = [SimpleNamespace(request_id=name, token_ids=(7,)) for name in self._left]
        self._left = {name: num - 1 for name, num in self._left.items() if num > 1}
        return SimpleNamespace(sampled=sampled)


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


@pytest.mark.usefixtures("threads")
def test_a_rate_is_of_a_few_steps_behind_the_first_tokens() -> None:
    engine = CountedEngine()
    load = Load(cast("Engine", engine), 1)
    assert len(load.decode(3)) == TOKENS // PART and not engine.has_work
    assert len(load.decode(1)) == TOKENS // PART and len(engine.seen) == 2 * (TOKENS + 16)


# A step of 10 s of which 8 are shared out: 6 s with two threads, 6.5 s with two ranks.
BEST = {"thread": 1 / 10, "threads": 1 / 6, "tensor": 1 / 6.5}


def test_a_forecast_for_one_core_is_what_was_measured() -> None:
    assert forecast(BEST, 1) == pytest.approx((BEST["tensor"], BEST["threads"], BEST["thread"]))


def test_more_cores_share_out_what_threads_made_faster_and_nothing_else() -> None:
    assert forecast(BEST, 4) == pytest.approx((1 / (2 + 1 + 0.5), 1 / (2 + 1), 1 / (2 + 2)))


def test_ranks_are_forecast_no_faster_than_all_threads() -> None:
    ranks, all_cores, own = forecast({**BEST, "thread": 1 / 13, "tensor": 1 / 5}, 16)  # more than twice as fast
    assert ranks == pytest.approx(all_cores) and own == pytest.approx(all_cores / 2)


def test_a_table_has_a_forecast_where_all_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    rates = {("decode", way): [rate / 2, rate] for way, rate in BEST.items()}
    show(rates, "threads")
    printed = capsys.readouterr().out
    assert "0.92 x threads's best" in printed and "= 1.14 x one process of 4" in printed
    show({key: rates[key] for key in list(rates)[1:]}, "threads")
    assert "forecast" not in capsys.readouterr().out
