"""Decides which tokens run next. Pure Python: no tensors; the clock is passed in.

scheduler        the interface: add, cancel, grant, append, update, plan and apply
validation       checks requests               waiting          the queue and its bounds
policies         the order of service          admission        gives slots to waiting sequences
running_stats    counts for admission          lengths          predicts output lengths
planner          plans one step                plan_writing     writes its plan
prefill_shares   shares a step among prompts
victims          chooses what is preempted     async_planner    plans a step before the last one is applied
decode_rows      rows of steps planned so      stage_planner    plans a step of a pipeline beside others
in_flight        planned steps, not applied    shortage         preempts, or has a sequence wait for a block
resizing         resizes the cache             changes          changes open requests for their clients
stage_shares     shares work among the steps of a pipeline
adapters         those of open requests, and which are loaded
state            queue, slots and blocks: the only module that changes a sequence's state
outputs          applies sampled tokens        beam             beam search
drafts           schedules drafted tokens      draft_stats      counts them
group, sequence, events, settings, costs, step_rates, histogram   values and state
"""

from collections.abc import Mapping
from types import MappingProxyType

# Which modules write which fields of the shared records Sequence, SequenceGroup and Drafting. The fields of every other
# object, SchedulerState included, are written in its own module only. A test verifies this table.
WRITERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # State and resources of a sequence
        "state": ("state",),
        "slot": ("state",),
        "adapter_slot": ("state",),
        "table": ("state",),
        "spare_slots": ("state",),
        "num_places": ("state",),
        "num_once_computed": ("state",),
        "num_preemptions": ("state", "outputs"),  # a beam inherits its parent's
        "sequences": ("validation", "state", "outputs"),  # created, ended, replaced by the live beams
        "unforked": ("validation", "state"),
        "capacity": ("async_planner", "drafts", "state", "planner"),  # each module that lets the cache grow the table
        "num_blocks_planned": ("async_planner", "state", "planner", "plan_writing"),
        "freed": ("state", "plan_writing"),
        "waited_at": ("shortage",),
        "num_waits": ("shortage",),
        # Progress
        "num_computed": ("drafts", "in_flight", "state"),
        "num_flying": ("in_flight", "state"),
        "last_step": ("planner",),
        "tokens": ("drafts", "in_flight", "outputs", "changes"),  # verified, sampled (twice), appended by the client
        "index": ("outputs",),
        "has_spoken": ("outputs",),
        "num_sampled": ("outputs",),
        "prompt_scores": ("outputs",),
        # Order of service and refusals
        "measure": ("changes", "scheduler", "waiting"),
        "refused_free": ("admission", "state"),
        "retry_step": ("admission", "state"),
        "num_overtaken": ("admission",),
        "num_cached": ("admission",),
        "first_scheduled_s": ("admission",),
        # Changed by the client while the request is open, and the credit it spends
        "asked_tokens": ("changes",),
        "deadline_s": ("changes",),
        "is_open": ("changes",),
        "max_tokens": ("changes",),
        "priority": ("changes",),
        "prompt": ("changes",),
        "credit": ("drafts", "state", "planner", "changes"),  # returned, spent, granted
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
