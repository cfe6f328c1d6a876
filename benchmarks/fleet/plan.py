"""The capacity plan: how many cells a rate takes with each kind of engine, and what clients then see."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from benchmarks.fleet.cell import CellKind
from benchmarks.fleet.device import BF16, FP8, StepCost, published_s
from benchmarks.fleet.engine import EngineKind
from benchmarks.fleet.loads import Load
from benchmarks.fleet.simulation import Following, Simulation, quantile

ENGINES = 16
FORMS = ("bf16", "fp8", "fp8, EAGLE", "fp8, prefill apart", "fp8, 4 GPUs")
CELLS = (10, 14, 20, 28, 40, 56, 80, 112, 160, 224, 320)

Figures = dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Goals:
    """What clients are promised, in milliseconds. `end_to_end_p99` is for short outputs; infinity: none."""

    ttft_p50: float = 100.0
    ttft_p95: float = 200.0
    ttft_p99: float = 500.0
    tpot_p95: float = 50.0
    end_to_end_p99: float = float("inf")

    def met(self, figures: Mapping[str, float]) -> bool:
        """Whether figures keep every goal."""
        return all(figures[field.name] <= getattr(self, field.name) for field in dataclasses.fields(self))


def kind_of(form: str, load: Load) -> CellKind:
    """Returns the cells of a form for a load; where prompts are computed apart, as many engines do as their work is of
    all work."""
    cost = StepCost(BF16 if form == "bf16" else FP8, num_gpus=4 if form.endswith("4 GPUs") else 1)
    engine = EngineKind(cost, num_drafts=3 if form.endswith("EAGLE") else 0)
    num_prefill = 0
    if form.endswith("apart"):
        num = len(load.jobs)
        num_input = sum(job.num_prompt for job in load.jobs) // num
        num_output = max(1, sum(job.num_output for job in load.jobs) // num)
        prompt_s = cost.seconds(num_input, num_input**2 / 2, 0) - cost.seconds(0, 0, 0)
        num_prefill = round(ENGINES * prompt_s / published_s(cost, num_input, num_output))
        num_prefill = min(ENGINES - 1, max(1, num_prefill))
    return CellKind(engine, num_engines=ENGINES, num_prefill=num_prefill)


def figures_of(following: Sequence[Following]) -> Figures:
    """Returns what clients saw: milliseconds, and the share of prompt tokens that caches held."""
    ttft = [one.ttft_s * 1e3 for one in following]
    tpot = [one.tpot_s * 1e3 for one in following if len(one.tokens) > 1]
    whole = [one.end_to_end_s * 1e3 for one in following]
    return {
        "ttft_mean": sum(ttft) / len(ttft),
        "ttft_p50": quantile(ttft, 0.50),
        "ttft_p95": quantile(ttft, 0.95),
        "ttft_p99": quantile(ttft, 0.99),
        "tpot_p95": quantile(tpot, 0.95),
        "end_to_end_p99": quantile(whole, 0.99),
        "cached": sum(one.num_cached for one in following) / sum(one.job.num_prompt for one in following),
        "refused": float(sum(one.num_refused for one in following)),
    }


def share_of(rate: float, num_cells: int, make: Callable[[float], Load], form: str) -> Figures:
    """Returns the figures of one of `num_cells` cells, which gets its share of the rate."""
    load = make(rate / num_cells)
    return figures_of(Simulation(kind_of(form, load), 1, load).play())


def fewest(
    rate: float, make: Callable[[float], Load], form: str, goals: Goals, told: Callable[[int, Figures], None]
) -> int | None:
    """Returns the fewest cells of `CELLS` that keep the goals; None if none does. Each try is `told`."""
    low, high, best = 0, len(CELLS) - 1, None
    while low <= high:
        middle = (low + high) // 2
        figures = share_of(rate, CELLS[middle], make, form)
        told(CELLS[middle], figures)
        if goals.met(figures):
            best, high = CELLS[middle], middle - 1
        else:
            low = middle + 1
    return best
