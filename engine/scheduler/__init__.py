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

# Which files write which fields of the values that all of them read: those of Sequence, Group and Drafting. Every other
# object's fields, Floor's too, are written in its own file alone. A test holds the code to it.
WRITERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Where a sequence is, and what it holds
        "state": ("floor",),
        "slot": ("floor",),
        "table": ("floor",),
        "spare_slots": ("floor",),
        "num_places": ("floor",),
        "num_once_computed": ("floor",),
        "num_preemptions": ("floor", "outputs"),  # a beam takes over its parent's
        "sequences": ("door", "floor", "outputs"),  # made, ended, replaced by the beams that go on
        "unforked": ("door", "floor"),
        "room": ("ahead", "drafts", "floor", "planner"),  # whoever has the cache grow the table
        "num_blocks_told": ("ahead", "floor", "planner"),
        # How far it is
        "num_computed": ("drafts", "flights", "floor"),
        "last_step": ("planner",),
        "tokens": ("drafts", "outputs", "scheduler"),  # verified, sampled, appended by the client
        "index": ("outputs",),
        "has_spoken": ("outputs",),
        "num_sampled": ("outputs",),
        "prompt_scores": ("outputs",),
        # Who goes first, and who did not fit
        "measure": ("scheduler", "waiting"),
        "refused_free": ("admission", "floor"),
        "retry_step": ("admission", "floor"),
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
        "credit": ("drafts", "floor", "planner", "scheduler"),  # given back, spent, granted
        "held_since_s": ("planner",),
        # Searches
        "candidates": ("floor", "outputs"),
        "completed": ("outputs",),
        "logprobs": ("outputs",),
        "score": ("outputs",),
        # Drafts
        "ids": ("drafts", "floor"),
        "parents": ("drafts", "floor"),
        "num_seen": ("drafts", "floor"),
    }
)
