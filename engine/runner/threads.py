"""How many threads compute: measured once at start, by decode steps of one sequence over the model that is to serve.

Takes a step, what sets the number of threads, and a clock; knows no model. More threads than memory can feed, or two on
one core's halves, gain nothing and take time from the other processes of the service.
"""

from collections.abc import Callable

RUNS = 5
MAX_S = 0.5  # after which no further run is begun: a large model has shown enough by then
WORTH = 0.8  # of a step's time: fewer threads are taken if they need less, as a busy start must not cost half a machine


def measure_threads(
    step: Callable[[], object], use: Callable[[int], object], most: int, clock: Callable[[], float]
) -> tuple[int, str]:
    """The number that is now in use, `most` or half of it, and why; `use` sets it. Each is judged by its best step, as
    nothing makes a step faster than it is."""
    counts = sorted({most, max(1, most // 2)}, reverse=True)
    if len(counts) == 1:
        return most, ""
    best = dict.fromkeys(counts, float("inf"))
    start = clock()
    for _ in range(RUNS):
        for count in counts:  # in turn: a moment's load meets both
            use(count)
            begun = clock()
            step()
            best[count] = min(best[count], clock() - begun)
        if clock() - start > MAX_S:
            break
    more, fewer = counts
    chosen = fewer if best[fewer] < WORTH * best[more] else more
    use(chosen)
    return chosen, f"a step of {best[more] * 1e3:.3g} ms, with {fewer} of {best[fewer] * 1e3:.3g} ms"
