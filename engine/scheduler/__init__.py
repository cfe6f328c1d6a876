"""Decides which tokens run next. Pure Python: the clock is passed in, no tensor is seen.

scheduler   the way in: add, cancel, grant, append, update, plan and apply
door        what may come in            waiting     the queue, and its bounds
policies    who goes first              admission   who is given slots now (census, lengths: what it goes by)
planner     who computes in this step   turns       how prompts share it      victims   who gives way
ahead       who computes in a step that is planned before the last one is applied      flights   steps in flight
floor       who is where: the one place that changes a sequence's state
outputs     what sampled tokens make of it               beam   who goes on in a search
group, sequence, events, settings, pace   values and state
"""

from collections.abc import Mapping
from types import MappingProxyType

# Which files write which fields of the values that all files read: those of Sequence, SequenceGroup and Drafting. The
# fields of every other object, SchedulerState too, are written in its own file alone. A test compares table and code.
WRITERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Where a sequence is, and what it holds
        "state": ("state",),
        "slot": ("state",),
        "table": ("state",),
        "spare_slots": ("state",),
        "num_places": ("state",),
        "num_once_computed": ("state",),
        "num_preemptions": ("state", "outputs"),  # a beam takes over its parent's
        "sequences": ("validation", "state", "outputs"),  # made, ended, replaced by the beams that go on
        "unforked": ("validation", "state"),
        "room": ("async_planner", "drafts", "state", "planner"),  # whoever has the cache grow the table
        "num_blocks_told": ("async_planner", "state", "planner"),
        # How far it is
        "num_computed": ("drafts", "in_flight", "state"),
        "last_step": ("planner",),
        "tokens": ("drafts", "outputs", "scheduler"),  # verified, sampled, appended by the client
        "index": ("outputs",),
        "has_spoken": ("outputs",),
        "num_sampled": ("outputs",),
        "prompt_scores": ("outputs",),
        # Who goes first, and who did not fit
        "measure": ("scheduler", "waiting"),
        "refused_free": ("admission", "state"),
        "retry_step": ("admission", "state"),
        "num_overtaken": ("admission",),
        "num_cached": ("admission",),
        "first_scheduled_s": ("admission",),
        # What the client changes while its request is open, and what it is charged
        "asked_tokens": ("scheduler",),
        "deadline_s": ("scheduler",),
        "is_open": ("scheduler",),
        "max_tokens": ("scheduler",),
        "priority": ("scheduler",),
        "prompt": ("scheduler",),
        "credit": ("drafts", "state", "planner", "scheduler"),  # given back, spent, granted
        "held_since_s": ("planner",),
        # Searches
        "candidates": ("state", "outputs"),
        "completed": ("outputs",),
        "logprobs": ("outputs",),
        "score": ("outputs",),
        # Drafts
        "ids": ("drafts", "state"),
        "parents": ("drafts", "state"),
        "num_seen": ("drafts", "state"),
    }
)
