"""Computes a step plan: flat lists to tensors, a forward pass, and a token per row that samples and per draft.

Only `place` and `launch` change the runner's state. On a CPU a step is done when `launch` returns (depth 0); on a
device `collect` waits for it. Depends on plans, not on requests, scheduling policy or text.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.groups import LayerGroups, one_group
from sluice_server.engine.kv_cache.moves import Move
from sluice_server.engine.models.model import Model
from sluice_server.engine.plan import Placement, StepPlan, StepResult
from sluice_server.engine.plugins.sampling import NO_SAMPLING, SamplingPlugins
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.sampling.matchers import SlotMatchers
from sluice_server.engine.sampling.rows import GrammarMasks
from sluice_server.engine.sampling.sampler import Sampler
from sluice_server.engine.worker.faults import device_faults
from sluice_server.engine.worker.forward import AcceptedMoves, ForwardPass, HiddenStates
from sluice_server.engine.worker.sample_positions import SamplePositions
from sluice_server.engine.worker.slots.adapters import NO_SLOTS, AdapterSlots
from sluice_server.engine.worker.slots.embeds import Given
from sluice_server.engine.worker.slots.images import EncoderCache
from sluice_server.engine.worker.slots.pooling import with_vectors
from sluice_server.engine.worker.slots.rows import SlotRows
from sluice_server.engine.worker.slots.sampling_plugins import with_errors
from sluice_server.kernels.layout.ragged import Tables

T = TypeVar("T")


class WantedStates(NamedTuple):
    """The hidden states of a step that are needed besides those that are sampled from.

    Attributes:
        is_whole: all of them.
        spans: those that score prompts, as ranges of the step's tokens.
    """

    is_whole: bool
    spans: list[tuple[int, int]]


class StepImages(NamedTuple):
    """What images give a step: rows in the place of embeddings, and positions in three directions."""

    given: Given
    turned: Given


class CompletedStep:
    """A step that has been computed."""

    is_done = True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def collect(self) -> StepResult:
        """Returns the result without waiting."""
        return self._result


class Runner:
    """Runs one model on one device, with its cache and the state of its slots."""

    depth = 0  # `launch` returns when the step is done

    def __init__(  # noqa: PLR0913 # the parts and sizes of a runner
        self,
        model: Model,
        store: BlockStore,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        grammars: Grammars | None = None,
        groups: LayerGroups | None = None,
        plugins: SamplingPlugins = NO_SAMPLING,
        images: EncoderCache | None = None,
        adapters: AdapterSlots = NO_SLOTS,
    ) -> None:
        """`groups` of the model's layers share the blocks of `store`; None: a block holds all layers. `images`: None
        for a model that takes none. `adapters`: what adapter slots hold, which changes between steps."""
        self._model = model
        self._store = store
        matchers = SlotMatchers(grammars or Grammars(None), model.config.vocab_size, model.config.eos_ids)
        groups = groups or one_group(model.config.windows)
        max_blocks, vocab_size = -(-max_model_len // block_size), model.config.vocab_size
        sizes = (max_num_seqs, max_blocks, vocab_size)
        self._rows = SlotRows(*sizes, matchers, plugins, groups.num, images, adapters)
        self._forward = ForwardPass(model, store, block_size, self._rows.block_tables, groups)
        self.on_accepted: Callable[[AcceptedMoves], None] = _unheard  # called after drafts' keys and values were moved
        self._sampler = Sampler()

    @property
    def block_tables(self) -> Tables:
        """The block tables of all slots in the first group, int32 [slots, blocks]; a view of the current state."""
        first: Tables = self._rows.block_tables[0]
        return first

    @property
    def progress(self) -> int:
        """The number of layers computed since start."""
        return self._model.layers_done

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Sets the callback that runs after each layer, so that the process stays responsive during a long step."""
        self._model.on_layer = on_layer

    def move(self, moves: list[Move]) -> None:
        """Carries out transfers between cache blocks and tiers in their order."""
        self._store.move(moves)

    def moved(self) -> list[tuple[Move, bool]]:
        """Returns the disk transfers that have ended since the last call, and whether they succeeded."""
        return self._store.moved()

    def place(self, plan: StepPlan) -> None:
        """Resets newly taken slots, then appends new blocks to the block tables."""
        for placement in plan.placements:
            self._rows.reset(placement)
        for run in plan.new_blocks:
            self._rows.extend(run)

    def idle(self) -> bool:
        """Returns False: there is nothing to prepare."""
        return False

    def images(self, plan: StepPlan) -> StepImages:
        """Returns what images give the plan's tokens, from rows that are kept, or computed now."""
        images = self._rows.images
        return StepImages(images.given(plan), images.turned(plan) if self._model.is_turned else [])

    def launch(self, plan: StepPlan, images: StepImages | None = None) -> CompletedStep:
        """Computes the plan's rows. `images`: what the method of that name gave for them, if it was called.

        Grammar masks are filled meanwhile; a step that fails waits for them too. Raises OutOfDeviceMemory and
        DeviceLost for device failures.
        """
        with device_faults():
            return self._compute(plan, images)

    def is_told(self, placement: Placement) -> bool:
        """Returns whether `images` or `wanted` of later plans depend on this placement."""
        return self._rows.images.changes_by(placement) or self._rows.prompts.changes_by(placement)

    def wanted(self, plan: StepPlan) -> WantedStates:
        """Returns which hidden states of a plan are needed besides those that are sampled from."""
        return WantedStates(self._is_whole(plan), self._rows.prompts.spans(plan))

    def _is_whole(self, plan: StepPlan) -> bool:
        """Returns whether all hidden states of a plan may be needed."""
        return self._rows.prompts.is_asked or bool(plan.pools)

    def launch_over(self, plan: StepPlan, logits_of: Callable[[], Tensor]) -> CompletedStep:
        """Samples behind a forward pass that is computed elsewhere. Grammar masks are filled meanwhile.

        `logits_of` begins it, and returns logits [S, V] of the plan's sample positions, which may be overwritten.
        """
        with device_faults():
            positions = SamplePositions.of(plan)
            logits, filled = self._beside_masks(plan, positions, logits_of)
            return CompletedStep(self._sample(plan, positions, logits, filled))

    def needs_hidden(self, plan: StepPlan) -> bool:
        """Returns whether a plan's forward pass needs more than ids, or gives more than logits to sample from."""
        rows, is_turned = self._rows, self._model.is_turned
        wanted = rows.prompts.spans(plan) or plan.pools or rows.adapters.are_of_host(plan)
        by_images = rows.images.given(plan) or (is_turned and rows.images.turned(plan))
        return bool(wanted or rows.embeds.given(plan, self._model) or by_images)

    def has_adapters(self, plan: StepPlan) -> bool:
        """Returns whether some row of a plan is computed with an adapter."""
        return self._rows.adapters.are_in(plan)

    def _beside_masks(
        self, plan: StepPlan, positions: SamplePositions, compute: Callable[[], T]
    ) -> tuple[T, GrammarMasks | None]:
        """Computes something while grammar masks are filled; returns it and them. If it fails, they are waited for."""
        if self._rows.listening:
            self._note_tokens(plan, positions)
        masks = self._rows.matchers.start(positions.slots, positions.ahead)
        try:
            found = compute()
        finally:
            filled = masks.result()
        return found, filled

    def _compute(self, plan: StepPlan, images: StepImages | None) -> CompletedStep:
        positions = SamplePositions.of(plan)

        def forward() -> HiddenStates:
            of_images, turned = images or self.images(plan)
            given = self._rows.embeds.given(plan, self._model) + of_images
            whole, sides = self._is_whole(plan), self._rows.adapters.sides(plan)
            return self._forward.compute(plan, positions, is_whole=whole, given=given, turned=turned, sides=sides)

        states, filled = self._beside_masks(plan, positions, forward)
        hidden = states.computed
        prompts = self._rows.prompts.score(plan, hidden, self._model.logits)
        read = self._rows.read_logits(positions.slots, filled)
        logits = self._model.wanted_logits(states.sampled, read) if positions.rows else states.sampled
        result = self._sample(plan, positions, logits, filled)
        if plan.pools:
            result = with_vectors(result, self._rows.pooling.pool(plan, hidden, self._model))
        return CompletedStep(dataclasses.replace(result, prompts=prompts) if prompts else result)

    def _sample(
        self, plan: StepPlan, sample_positions: SamplePositions, logits: Tensor, masks: GrammarMasks | None
    ) -> StepResult:
        """Samples from logits [S, V], one row behind each sample position."""
        if not sample_positions.rows:
            return StepResult([-1] * len(plan.slots))
        slots, ahead = sample_positions.slots, sample_positions.ahead
        errors = self._rows.plugins.apply(logits, slots, ahead)
        rows = self._rows.sampling_rows(slots, sample_positions.positions, ahead, masks)
        strategies = self._rows.plugins.strategies(slots, ahead)
        sampled = with_errors(self._sampler.sample(logits, rows, strategies), errors)
        if plan.drafts and self._rows.listening:
            for slot, position, drafts in sample_positions.kept(sampled):
                self._rows.note(slot, position, drafts)
        if plan.parents:
            self._close_ranks(sample_positions.moves(sampled))
        if self._rows.listening:
            self._rows.matchers.expect(sample_positions.ends(sampled))
        return sample_positions.collect(sampled, len(plan.slots))

    def _close_ranks(self, moves: AcceptedMoves) -> None:
        """Moves the keys and values of accepted drafts to the positions that they would have in a chain."""
        if moves:
            self._forward.move_accepted(moves)
            self.on_accepted(moves)

    def _note_tokens(self, plan: StepPlan, sample_positions: SamplePositions) -> None:
        """Passes the slots that sample their current tokens; drafts are not among them yet."""
        slots, listening = plan.slots, self._rows.listening
        if plan.num_tokens == len(slots):  # one token per row, none of them drafted
            for i in sample_positions.rows:
                for one in listening.get(slots[i], ()):
                    one.note(slots[i], plan.starts[i] + 1, plan.token_ids[i : i + 1])
            return
        ends = list(itertools.accumulate(plan.query_lens))
        for i in sample_positions.rows:
            if slots[i] not in listening:
                continue
            num, drafted = plan.query_lens[i], plan.drafts.get(i, 0)
            certain = plan.token_ids[ends[i] - num : ends[i] - drafted]
            self._rows.note(slots[i], plan.starts[i] + num - drafted, certain)


def _unheard(moves: AcceptedMoves) -> None:
    """Ignores moves: the default of `on_accepted`."""
