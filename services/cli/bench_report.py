"""Shows the result of a load test: tables on the terminal, and a plot of latency against load."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from sluice_server.services.cli.plot import Panel, svg

Figures: TypeAlias = dict[str, Any]  # as returned by `load.report`
Levels: TypeAlias = Sequence[tuple[float, Figures]]  # by load


def show(figures: Figures) -> None:
    """Print the figures as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "mean", "p50", "p90", "p99", "max", title="milliseconds")
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        row = figures[name]
        table.add_row(name.removesuffix("_ms"), *(f"{row[key]:.2f}" for key in row))
    console = Console()
    if figures["e2e_ms"]:
        console.print(table)
    num_failed = sum(figures["errors"].values())
    console.print(
        f"{figures['requests']} requests, {figures['output_tokens']} tokens in {figures['duration_s']} s: "
        f"{figures['output_tokens_per_s']} tokens/s, {figures['requests_per_s']} requests/s; {num_failed} failed"
    )
    for code, num in figures["errors"].items():
        console.print(f"{num} x {code}, first: {figures['first_errors'][code]}", markup=False)


def show_levels(levels: Levels) -> None:
    """Print a table with one row per load."""
    # Imported here, as above.
    from rich.console import Console
    from rich.table import Table

    table = Table("load", "TTFT p50", "p99", "ITL p50", "p99", "tokens/s", "requests/s", "errors", title="milliseconds")
    for level, one in levels:
        latencies = [f"{one[name].get(rank, 0.0):.2f}" for name in ("ttft_ms", "itl_ms") for rank in ("p50", "p99")]
        rates = [str(one["output_tokens_per_s"]), str(one["requests_per_s"]), str(sum(one["errors"].values()))]
        table.add_row(f"{level:g}", *latencies, *rates)
    Console().print(table)


def load_plot(levels: Levels, axis: str) -> str:
    """Returns TTFT, time between messages and throughput against load, as SVG."""
    panels = [
        Panel(title, {rank: [one[name].get(rank, 0.0) for _, one in levels] for rank in ("p50", "p90", "p99")})
        for title, name in (("TTFT, ms", "ttft_ms"), ("gap between messages, ms", "itl_ms"))
    ]
    panels.append(Panel("tokens a second", {"output": [one["output_tokens_per_s"] for _, one in levels]}))
    return svg([level for level, _ in levels], axis, panels)
