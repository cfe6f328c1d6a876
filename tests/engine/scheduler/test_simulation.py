"""Random histories of the engine's own classes: nothing is lost or leaked, no request starves, all is reproducible."""

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice_server.engine.kv_cache.tiers import TierStats
from tests.engine.scheduler.simulate import Simulation, play, run

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


FIVES = [range(first, first + 5) for first in range(0, 50, 5)]
EVENTS = 3000
OF_STORE = {"num_fetched", "num_missed"}
NUM_COUNTED = 15  # histories that must reach everything together


class Histories:
    """Simulations that have run, each once. The first ones are kept: what they reached is added up."""

    def __init__(self) -> None:
        self._played: dict[int, Simulation] = {}

    def of(self, seed: int) -> Simulation:
        """The simulation of a seed after `EVENTS` events."""
        found = self._played.get(seed)
        if found is None:
            found = Simulation(seed)
            run(found, seed, EVENTS)
            if seed < NUM_COUNTED:
                self._played[seed] = found
        return found


@pytest.fixture(scope="module")
def histories() -> Histories:
    return Histories()


@pytest.mark.parametrize("seeds", FIVES, ids=str)
def test_fifty_histories(seeds: range, histories: Histories) -> None:
    """150,000 events; a failure names the seed that replays it."""
    for seed in seeds:
        histories.of(seed)


@pytest.mark.long
@pytest.mark.parametrize("seeds", FIVES, ids=str)
def test_a_million_events(seeds: range) -> None:
    """The same histories, 20,000 events each."""
    for seed in seeds:
        play(seed, 20_000)


def test_histories_run_in_several_processes() -> None:
    done = simulate("--seeds", "4", "--events", "4000", "--jobs", "2")
    assert done[0] == "4 seeds of 1000 events"


@pytest.mark.long
def test_equal_seeds_give_equal_traces_in_every_process() -> None:
    traces = [simulate("--seed", "3", "--events", "3000", hash_seed=hash_seed)[-1] for hash_seed in "12"]
    assert traces[0] == traces[1] == Simulation(3).run(3000) != Simulation(4).run(3000)


def simulate(*options: str, hash_seed: str = "0") -> list[str]:
    """The lines that the command prints."""
    command = [sys.executable, "-m", "tests.engine.scheduler.simulate", *options]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["simulate.py", "ledger.py", "fake_model.py"])
def test_the_simulator_drives_the_very_classes_that_the_engine_imports(name: str) -> None:
    """The simulator may neither subclass nor patch them, or it would test other classes."""
    tree = ast.parse((HERE / name).read_text())
    ours = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sluice_server.engine.")
        for alias in node.names
    }
    assert ours, "it imports the engine"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            assert not {base.id for base in node.bases if isinstance(base, ast.Name)} & ours, "subclasses one of ours"
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                path = ast.unparse(target)
                assert path.split(".")[0] not in ours, f"patches {path}"
                assert not path.startswith(("self.scheduler.", "self.cache.")), f"patches {path}"
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("setattr", "object.__setattr__", "patch", "monkeypatch.setattr")


def test_the_histories_reach_everything(histories: Histories) -> None:
    """The histories contain preemptions, hits and the rest, or the simulation would prove nothing about them."""
    ends: dict[str, int] = {}
    drafted = accepted = preemptions = recomputed = hits = evictions = resorts = swaps = ahead = trees = pooled = 0
    beside = 0
    tiers = TierStats()
    for seed in range(NUM_COUNTED):
        simulation = histories.of(seed)
        for how, num in simulation.ledger.ends.items():
            ends[how] = ends.get(how, 0) + num
        preemptions += simulation.scheduler.num_preemptions
        recomputed += simulation.scheduler.num_recomputed
        drafted += simulation.scheduler.draft_stats.num_drafted
        accepted += simulation.scheduler.draft_stats.num_accepted
        resorts += simulation.scheduler.num_last_resorts
        hits += simulation.cache.stats.hit_tokens
        evictions += simulation.cache.stats.evictions
        swaps += simulation.scheduler.num_swaps
        ahead += simulation.num_ahead
        beside += simulation.num_beside
        trees += simulation.num_trees
        pooled += simulation.ledger.num_pooled
        if simulation.cache.tiers is not None:
            for field in dataclasses.fields(tiers):
                own = getattr(simulation.cache.tiers.stats, field.name)
                setattr(tiers, field.name, getattr(tiers, field.name) + own)
    assert min(ends.values()) > 10, ends
    assert preemptions > 150 and recomputed > 500 and hits > 500 and evictions > 500, (preemptions, recomputed)
    assert resorts > 0 and swaps > 50 and ahead > 1500 and beside > 1500 and trees > 500 and pooled > 300
    assert accepted > 500 and drafted - accepted > 500
    # Those of the host's store, which these caches lack, are 0: the tiers' stateful test has them.
    assert min(num for name, num in dataclasses.asdict(tiers).items() if name not in OF_STORE) > 100, tiers
