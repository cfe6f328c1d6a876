"""How a lane falls asleep and wakes: at level 1 its processes stay and empty their cache, at level 2 they end. Pure."""

import msgspec

from sluice_server.services.process.model_commands import SleepLane
from sluice_server.services.process.model_table import LaneState
from sluice_server.services.supervisor.lane import Lane

FOREVER_S = 1e8  # a grace from which on it is no limit


def ask_to_sleep(lane: Lane, asked: SleepLane, now_s: float) -> None:
    """Has a lane fall asleep for an operator, unless it sleeps as deeply."""
    is_light, lane.is_asked = asked.level == 1, False
    if lane.entry.sleep_level >= asked.level:
        return
    lane.is_kept, lane.wanted_s = True, None
    until_s = now_s + asked.grace_s
    if lane.entry.state is LaneState.NAPPING:
        lane.doze(now_s)  # it has nothing open
    elif lane.sleeps and lane.until_s is not None:  # it is about to
        lane.doze(min(until_s, lane.until_s), is_light=is_light and lane.is_light, yields=lane.yields)
    else:
        lane.doze(until_s, is_light=is_light)


def make_room(lane: Lane, now_s: float) -> None:
    """Has a lane end its processes for another one, once what it has open has ended."""
    is_napping = lane.entry.state is LaneState.NAPPING
    lane.doze(now_s if is_napping else now_s + FOREVER_S, yields=True)


def is_called_back(lane: Lane) -> bool:
    """Whether requests wait for a lane that is about to sleep for an operator: it stays then."""
    return lane.sleeps and bool(lane.waiting) and not lane.yields


def stay(lane: Lane, now_s: float) -> None:
    """Keeps a lane awake that was about to sleep."""
    lane.stay()
    if not lane.is_starting:
        lane.since_s = now_s
    if not lane.has_processes:  # it still waited for room
        lane.wanted_s = now_s


def nap(lane: Lane) -> None:
    """Has a lane sleep at level 1: its engines empty their caches when they see that."""
    lane.until_s = None
    lane.serving.clear()
    lane.become(LaneState.NAPPING)


def fall_asleep(lane: Lane) -> None:
    """Has a lane sleep at level 2: its processes end."""
    lane.until_s, lane.is_light = None, False
    lane.serving.clear()
    lane.become(LaneState.SLEEPING)


def take_emptied(lane: Lane) -> bool:
    """Notes whether all engines of a lane that naps have emptied their caches; returns whether that has changed."""
    is_empty = lane.engines <= lane.emptied
    is_new = is_empty is not lane.entry.is_empty
    lane.entry = msgspec.structs.replace(lane.entry, is_empty=is_empty)
    return is_new
