"""The open load benchmark: its table over rounds, what is kept, and the settings a peer is found at its best with."""

import asyncio
import json
from pathlib import Path
from typing import ClassVar, cast

from benchmarks.cpu.goodput import Trial
from benchmarks.cpu.load_lengths import sharegpt
from benchmarks.cpu.open_load import Bench, Contestant, Found, limit_of, read, table
from benchmarks.cpu.open_loop import Connect
from benchmarks.cpu.peer_settings import PeerSettings, best_of, search
from benchmarks.cpu.servers import Server

RATES = {"sluice float32, HTTP": (9.0, 10.0, 6.0), "vLLM float32, HTTP": (3.0, 5.0, 4.0)}


def rows() -> Found:
    return {
        ("goodput", number, name): {"rate": rate, "goodput": rate - 1}
        for name, rates in RATES.items()
        for number, rate in enumerate(rates)
    }


def test_ours_is_compared_with_the_peer_of_the_same_round() -> None:
    found = table(rows())
    assert found["goodput_over_peer"] == {"sluice float32, HTTP": {"median": 2.25, "least": 1.67, "most": 4.0}}
    assert found["goodput"] == {
        name: {
            "rate": sorted(rates)[1],
            "goodput": sorted(rates)[1] - 1,
            "rounds": {"rate": list(rates), "goodput": [rate - 1 for rate in rates]},
        }
        for name, rates in RATES.items()
    }


def test_a_search_begins_at_the_median_of_those_before() -> None:
    assert limit_of(rows(), "sluice float32, HTTP") == 9.0
    assert limit_of(rows(), "another") == 0.0


class Disturbed(Bench):
    """Keeps the goals up to ten requests a second, but in the first trial of each rate."""

    tried: ClassVar[set[float]] = set()

    def warm(self, one: Contestant) -> None:
        pass

    def trial(self, one: Contestant, rate: float, seed: int) -> Trial:
        passes = rate in self.tried and rate < 10.0
        self.tried.add(rate)
        return Trial(rate, 20, 0.05, 0.1 if passes else 0.3, 0.01, rate if passes else 1.0, 0, passes)


def test_figures_are_of_the_trial_that_kept_the_goals() -> None:
    nobody = Contestant("nobody", cast(Server, None), cast(Connect, None))
    with asyncio.Runner() as runner:
        found = Disturbed("61M", sharegpt(), 8.0, runner).limit(nobody, 8.0, 0)
    assert 8.0 <= found["rate"] < 10.0
    assert found["goodput"] == found["rate"] and found["ttft_p95_ms"] == 100.0


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("".join(json.dumps([*key, row]) + "\n" for key, row in rows().items()))
    assert read(kept) == rows() and read(tmp_path / "none") == {}


def test_a_change_is_kept_if_it_is_faster() -> None:
    def measured(settings: PeerSettings) -> dict[str, float]:
        rate = 100.0 + 20.0 * (settings.stream_interval > 1) - 30.0 * (settings.threads == 1)
        return {"tokens_per_s": rate + 5.0 * (settings.block_size == 32 and settings.stream_interval > 1)}

    tried = list(search(measured))
    best = max(tried, key=lambda one: one[1]["tokens_per_s"])
    assert best == (PeerSettings(stream_interval=8, block_size=32), {"tokens_per_s": 125.0})
    assert tried[2][0] == PeerSettings(stream_interval=8, threads=1)
    assert tried[3][0] == PeerSettings(stream_interval=8, block_size=32), (
        "what was slower is tried with what comes next"
    )
    assert list(search(lambda settings: None)) == []


def test_the_settings_found_are_those_of_the_comparison(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert best_of(path) == PeerSettings()
    path.write_text(json.dumps({"best": {"form": "bfloat16", "threads": 1, "stream_interval": 8, "block_size": 32}}))
    assert best_of(path) == PeerSettings("bfloat16", 1, 8, 32)
    assert best_of(path).options() == ("--stream-interval", "8", "--block-size", "32")
