"""Records the steps of a model on a device, and says beforehand how many bytes they will take.

Takes sizes of slots and drafts; depends on no plan.
"""

from typing import NamedTuple

import torch

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.models.layers.device_sides import DeviceTables
from sluice_server.engine.models.model import Model
from sluice_server.engine.worker.device import Device
from sluice_server.engine.worker.graphs import Graphs, RowShape, forms_of
from sluice_server.engine.worker.slots.state import DeviceState, Slots
from sluice_server.engine.worker.steps import RecordedStep, SampledIds, UniformSteps, own_ids


class InFlightDrafts(NamedTuple):
    """The drafts for which steps are recorded.

    Attributes:
        lengths: numbers of drafts of a row; there are recorded steps for rows of at most so many.
        may_branch: whether several drafts may follow the same token.
    """

    lengths: tuple[int, ...]
    may_branch: bool = False


NO_DRAFTS = InFlightDrafts(())


class Recording(NamedTuple):
    """Recorded steps, and the state of slots from which they compute."""

    state: DeviceState
    steps: UniformSteps
    graphs: Graphs[RecordedStep]


def record(  # noqa: PLR0913 # all that is recorded
    model: Model,
    store: BlockStore,
    device: Device,
    slots: Slots,
    drafts: InFlightDrafts,
    adapters: DeviceTables | None = None,
    sampled_ids: SampledIds | None = None,
) -> Recording:
    """Records the steps that every start needs: plain decode steps, those with drafts and mixed ones.

    Steps of rows that share a prefix, and further sizes, are recorded while idle. Where ranks share sampled ids, all
    are recorded now: what one of them could not record later would end the group.
    """
    state = DeviceState(device, model.device, slots)
    state.note(0, 0, [0])  # compiles the kernels that write to rows
    state.extend(0, 0, [0])
    state.flush()
    shared = sampled_ids or own_ids
    steps = UniformSteps(model, store, state, device, most_sampled(slots, drafts), adapters, shared)
    graphs = new_graphs(model, steps, slots, drafts)
    graphs.warm()
    if sampled_ids is not None:
        graphs.finish()
    return Recording(state, steps, graphs)


def recorded_bytes(  # noqa: PLR0913 # all that is recorded
    model: Model,
    cache_dtype: torch.dtype,
    device: Device,
    slots: Slots,
    drafts: InFlightDrafts = NO_DRAFTS,
    adapters: DeviceTables | None = None,
    sampled_ids: SampledIds | None = None,
) -> int:
    """Returns the bytes that recorded steps and slot state will take on the device, beside weights and cache.

    Measured over a cache of one block, before the real cache exists. `device` must not be used afterwards: the runner
    takes another.
    """
    before = device.taken()
    state = DeviceState(device, model.device, slots)
    store = BlockStore(model.new_cache(1, slots.block_size, cache_dtype))
    shared = sampled_ids or own_ids
    steps = UniformSteps(model, store, state, device, most_sampled(slots, drafts), adapters, shared)
    own = device.taken() - before
    return own + new_graphs(model, steps, slots, drafts).bytes_of_all(device.taken)


def most_sampled(slots: Slots, drafts: InFlightDrafts) -> int:
    """Returns the tokens that a step samples at most."""
    return slots.num * (1 + max(drafts.lengths, default=0))


def new_graphs(model: Model, steps: UniformSteps, slots: Slots, drafts: InFlightDrafts) -> Graphs[RecordedStep]:
    """Returns the set of steps to record; none is recorded yet."""
    later = [(1, RowShape.SHARED)] if may_share(model) else []
    forms = forms_of(drafts.lengths, may_branch=drafts.may_branch)
    return Graphs(slots.num, forms, steps.record, later, slots.max_tokens, with_adapters=slots.adapter_slots > 0)


def may_share(model: Model) -> bool:
    """Returns whether shared prefixes are attended to separately.

    That needs full attention (no window) and a model whose sums may depend on other rows (not `is_fixed`).
    """
    return model.has_full_attention and not model.is_fixed
