"""Growth of the processes of a service while it works, and whether that is a leak."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import psutil

from tests.system.service import Service

CHILDREN = "sluice_server.services."  # modules that processes of the ring run as children


def processes(service: Service) -> dict[str, psutil.Process]:
    """All processes of a service: those with a title, and their children by the last name of their module."""
    titled = service.titled()
    found = {"supervisor": psutil.Process(service.process.pid), **titled}
    for name, process in titled.items():
        numbers = Counter[str]()
        for child in process.children(recursive=True):
            *_, module = child.cmdline()
            if module.startswith(CHILDREN):
                kind = module.rpartition(".")[2]
                found[f"{name}/{kind}-{numbers[kind]}"] = child
                numbers[kind] += 1
    return found


def sizes(service: Service, work: Callable[[int], None], rounds: int) -> dict[str, list[int]]:
    """Resident bytes of each process after each round of work. The processes must stay the same."""
    watched = processes(service)
    found: dict[str, list[int]] = {name: [] for name in watched}
    for number in range(rounds):
        work(number)
        for name, process in watched.items():
            found[name].append(process.memory_info().rss)
    assert processes(service) == watched, "a process was started anew"
    return found


def slope(values: Sequence[int]) -> float:
    """The rise from one value to the next: the median over all pairs, which a few outliers do not move."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - early) / (to - at) for (at, early), (to, later) in pairs)


def growing(found: Mapping[str, Sequence[int]], most: float) -> dict[str, float]:
    """The processes that grow by more than `most` bytes from one value to the next, and by how many."""
    slopes = {name: slope(values) for name, values in found.items()}
    return {name: rise for name, rise in slopes.items() if rise > most}
