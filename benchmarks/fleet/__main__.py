"""Simulates a fleet at 10,000 requests a second: a capacity plan as table and plot, and the loss of a cell.

    make bench-fleet TRACES=folder        # or: python -m benchmarks.fleet --traces folder

Scheduler, cache, router, admission and the clients' choice of a cell are the classes that serve. What a step takes is
computed from published figures of an H100 (`benchmarks.fleet.device`), for Llama 3.1 8B, one GPU an engine unless said
otherwise, 16 engines a cell. The folder has `mooncake_conversation.jsonl` and `azure_2023_code.csv`, which are replayed
faster; one that is not there is left out. A plan simulates one cell with its share of the load; `--whole 40` simulates
40 cells with their clients, and loses one.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.fleet.loads import Load, azure, mooncake, steady
from benchmarks.fleet.plan import CELLS, FORMS, Figures, Goals, fewest, figures_of, kind_of, share_of
from benchmarks.fleet.simulation import Simulation, quantile
from benchmarks.machine import RESULTS, save
from sluice_server.services.cli.plot import Panel, svg

RATE = 10_000.0
FLEET = 40  # cells, which every table has
STEADY_S = 4.0
SHORT, CHAT = (512, 16), (512, 256)
COLUMNS = ("ttft_p50", "ttft_p95", "ttft_p99", "tpot_p95", "end_to_end_p99")


def loads_in(folder: Path | None, num: int) -> dict[str, tuple[Callable[[float], Load], Goals]]:
    """Returns the loads by name: each as a function of the rate of one cell, with its goals."""
    found: dict[str, tuple[Callable[[float], Load], Goals]] = {
        "512 in, 16 out": (lambda rate: steady(*SHORT, rate, enough(num, rate), 1), Goals(end_to_end_p99=500.0)),
        "512 in, 256 out": (lambda rate: steady(*CHAT, rate, enough(num, rate), 1), Goals()),
    }
    if folder is not None and (path := folder / "azure_2023_code.csv").exists():
        found["Azure 2023 code"] = functools.partial(azure, path, num=num), Goals()
    if folder is not None and (path := folder / "mooncake_conversation.jsonl").exists():
        found["Mooncake conversation"] = functools.partial(mooncake, path, num=num), Goals()
    return found


def enough(num: int, rate: float) -> int:
    """Returns how many requests of one size are simulated: so many that engines have as many at once as they will."""
    return max(num, int(rate * STEADY_S))


def line(name: str, num_cells: int, figures: Figures, mark: str) -> str:
    """Returns a row of the table."""
    numbers = " ".join(f"{figures[column]:8.0f}" for column in COLUMNS)
    return f"{name:44} {num_cells:5} {numbers} {figures['cached']:7.1%} {mark}"


def plan(folder: Path | None, num: int, forms: list[str]) -> dict[str, dict[str, dict[int, Figures]]]:
    """Prints the plan row by row; returns its figures by load, form and number of cells."""
    print(f"{'load and engines':44} {'cells':>5} " + " ".join(f"{one[-8:]:>8}" for one in COLUMNS) + "  cached")
    found: dict[str, dict[str, dict[int, Figures]]] = {}
    for name, (make, goals) in loads_in(folder, num).items():
        for form in forms:
            tried: dict[int, Figures] = {}
            best = fewest(RATE, make, form, goals, tried.__setitem__)
            if FLEET not in tried:
                tried[FLEET] = share_of(RATE, FLEET, make, form)
            for num_cells, figures in sorted(tried.items()):
                mark = "fewest" if num_cells == best else "" if goals.met(figures) else "-"
                print(line(f"{name}; {form}", num_cells, figures, mark), flush=True)
            found.setdefault(name, {})[form] = tried
    return found


def drawn(found: dict[str, dict[str, dict[int, Figures]]]) -> str:
    """Returns a plot: time to the first token by cells, a diagram for each load."""
    tried = sorted({num for forms in found.values() for by_cells in forms.values() for num in by_cells})
    panels = []
    for name, forms in found.items():
        lines = {form: _filled(by_cells, tried) for form, by_cells in forms.items()}
        panels.append(Panel(f"{name}: TTFT p95, ms (at most 1,000)", lines))
    return svg([float(num) for num in tried], "cells of 16 engines", panels)


def _filled(by_cells: dict[int, Figures], tried: list[int]) -> list[float]:
    """Returns a value for each number of cells; where one was not tried, that of the nearest that was."""
    nearest = [min(by_cells, key=lambda one: (abs(CELLS.index(one) - CELLS.index(num)), one)) for num in tried]
    return [min(1000.0, by_cells[num]["ttft_p95"]) for num in nearest]


def whole(num_cells: int, seconds: float, form: str, *, loses: bool) -> dict[str, float]:
    """Simulates all cells and their clients with short requests; one cell is lost half-way. Prints what clients saw."""
    load = steady(*SHORT, RATE * num_cells / FLEET, int(RATE * num_cells / FLEET * seconds), 1)
    simulation = Simulation(kind_of(form, load), num_cells, load, lost_at_s=seconds / 2 if loses else None)
    following = simulation.play()
    print(line(f"{num_cells} cells and clients; {form}", num_cells, figures_of(following), ""))
    before = [one for one in following if one.job.at_s < seconds / 2 and not one.is_moved]
    after = [one for one in following if one.job.at_s >= seconds / 2]
    moved = [one for one in following if one.is_moved]
    print(line("  that came in the first half", num_cells, figures_of(before), ""))
    print(line("  that came in the second half", num_cells, figures_of(after), ""))
    lost = sum(len(one.tokens) != one.job.num_output for one in following)
    found = {"moved": float(len(moved)), "lost": float(lost), "refused": figures_of(following)["refused"]}
    if moved:
        found["gap_p99_ms"] = quantile([one.gap_s * 1e3 for one in moved if len(one.tokens) > 1], 0.99)
        print(f"  moved to another cell: {len(moved)}, longest pause p99 {found['gap_p99_ms']:.0f} ms; lost: {lost}")
    return found | {f"all_{name}": value for name, value in figures_of(following).items()}


def main() -> None:
    """Prints the plan, and writes it with its plot into benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of the traces")
    parser.add_argument("--requests", type=int, default=1000, help="of each simulation of a cell, at least")
    parser.add_argument("--forms", default=";".join(FORMS), help="of engines, between semicolons")
    parser.add_argument("--whole", type=int, default=0, metavar="CELLS", help="simulate so many cells; 0 makes a plan")
    parser.add_argument("--seconds", type=float, default=6.0, help="of --whole")
    parser.add_argument("--no-loss", action="store_true", help="of --whole: no cell is lost")
    options = parser.parse_args()
    if options.whole:
        print(json.dumps(whole(options.whole, options.seconds, "fp8", loses=not options.no_loss)))
        return
    found = plan(options.traces, options.requests, options.forms.split(";"))
    (RESULTS / "fleet.svg").write_text(drawn(found))
    save("fleet", f"python -m benchmarks.fleet --traces … --requests {options.requests}", {"plan": found})


if __name__ == "__main__":
    main()
