"""The state of each slot on the host, as arrays indexed by slot.

`SlotRows.reset` is the only function that resets a slot. Takes slots and sampling parameters.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch

from sluice_server.engine.kv_cache.table import BlockRun
from sluice_server.engine.plan import Placement
from sluice_server.engine.plugins.sampling import NO_SAMPLING, SamplingPlugins
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling.columns import FLOATS, INTS, key_of, neutral, pack, sampling_rows
from sluice_server.engine.sampling.matchers import SlotMatchers
from sluice_server.engine.sampling.rows import GrammarMasks, LogprobRows, SamplingParamRows, SamplingRows
from sluice_server.engine.worker.slots.adapters import NO_SLOTS, AdapterSlots, SlotAdapters
from sluice_server.engine.worker.slots.adjustments import SlotAdjustments
from sluice_server.engine.worker.slots.banned_tokens import SlotBannedTokens
from sluice_server.engine.worker.slots.embeds import SlotEmbeds
from sluice_server.engine.worker.slots.images import EncoderCache, SlotImages
from sluice_server.engine.worker.slots.pooling import SlotPooling
from sluice_server.engine.worker.slots.prompts import SlotPrompts
from sluice_server.engine.worker.slots.sampling_plugins import SlotSamplingPlugins
from sluice_server.kernels.reference.adjust import TokenMask

MAX_KEPT = 16  # combinations of slots: rows with drafts of several lengths alternate
NOTHING: Mapping[int, Sequence[int]] = MappingProxyType({})


class TokenListener(Protocol):
    """Follows the tokens of slots."""

    def listens(self, slot: int) -> bool:
        """Returns whether the slot's tokens must be passed to `note`."""
        ...

    def note(self, slot: int, position: int, computed: Sequence[int]) -> None:
        """Records that the slot now samples the token at `position`.

        `computed` are the tokens right before it; some of them may be new.
        """
        ...


class SlotRows:
    """Block tables and sampling parameters of `num_slots` slots."""

    def __init__(  # noqa: PLR0913 # the parts and sizes of all state
        self,
        num_slots: int,
        max_blocks: int,
        vocab_size: int,
        matchers: SlotMatchers,
        plugins: SamplingPlugins = NO_SAMPLING,
        num_groups: int = 1,
        images: EncoderCache | None = None,
        adapters: AdapterSlots = NO_SLOTS,
    ) -> None:
        self.matchers = matchers
        self.plugins = SlotSamplingPlugins(plugins)
        self.block_tables = np.zeros((num_groups, num_slots, max_blocks), dtype=np.int32)
        self._floats = neutral(FLOATS, num_slots)
        self._ints = neutral(INTS, num_slots)
        self._num_logprobs = np.full(num_slots, -1, dtype=np.int64)
        self._logprob_ids: dict[int, tuple[int, ...]] = {}
        self.prompts = SlotPrompts()
        self.pooling = SlotPooling()
        self.embeds = SlotEmbeds()
        self.images = SlotImages(images)
        self.adapters = SlotAdapters(adapters)
        self._adjustments = SlotAdjustments(vocab_size)
        self._banned_tokens = SlotBannedTokens()
        self._listeners: tuple[TokenListener, ...] = (self._adjustments, self._banned_tokens, matchers, self.plugins)
        self.listening: dict[int, list[TokenListener]] = {}  # by slot: listeners that follow its tokens
        self._whole: set[int] = set()  # slots whose logits are read beyond what a grammar allows
        self._keys: dict[int, tuple[object, ...]] = {}  # by slot: what `_fixed` depends on
        # By slots that sampled; cleared by `reset`, unless the slot's next sequence has the same parameters.
        self._fixed: dict[tuple[int, ...], SamplingParamRows] = {}

    def reset(self, placement: Placement) -> None:
        """Replaces the state of the slot's former sequence."""
        slot = placement.slot
        self.block_tables[:, slot] = 0
        self._take(slot, placement.params, placement.output_index)
        self._adjustments.reset(placement)
        self._banned_tokens.reset(placement)
        self.prompts.reset(placement)
        self.pooling.reset(placement)
        self.embeds.reset(placement)
        self.images.reset(placement)
        self.adapters.reset(placement)
        self.matchers.reset(placement)
        self.plugins.reset(placement)
        self.listening.pop(slot, None)
        self._whole.discard(slot)
        if placement.params.logprobs >= 0 or self.plugins.listens(slot):
            self._whole.add(slot)
        listeners = [one for one in self._listeners if one.listens(slot)]
        if listeners:
            self.listening[slot] = listeners

    def _take(self, slot: int, params: SamplingParams, output_index: int) -> None:
        """Keeps the numbers of a slot's sequence, unless it has them already: requests of one caller often agree, and
        the rows made of them serve again."""
        key = key_of(params, output_index)
        if self._keys.get(slot) == key:
            return
        self._keys[slot] = key
        self._fixed.clear()
        owner = [(params, output_index)]
        self._floats[slot] = pack(FLOATS, owner)
        self._ints[slot] = pack(INTS, owner)
        self._num_logprobs[slot] = params.logprobs
        self._logprob_ids.pop(slot, None)
        if params.logprob_token_ids:
            self._logprob_ids[slot] = params.logprob_token_ids

    def extend(self, run: BlockRun) -> None:
        """Writes a part of a slot's block table."""
        self.block_tables[run.group, run.slot, run.first : run.first + len(run.blocks)] = run.blocks

    def note(self, slot: int, position: int, computed: Sequence[int]) -> None:
        """Records that the slot now samples the token at `position`; `computed` are the tokens right before it."""
        for one in self.listening.get(slot, ()):
            one.note(slot, position, computed)

    def sampling_rows(
        self,
        slots: list[int],
        positions: list[int],
        ahead: Mapping[int, Sequence[int]] = NOTHING,
        masks: GrammarMasks | None = None,
    ) -> SamplingRows:
        """Returns the parameters of the rows that sample, each for the token at its position.

        A slot has one more row for each of its drafts. `ahead`: by row of a draft, the drafts up to it. Where a grammar
        is complete, its end outweighs min_tokens.
        """
        fixed = self._fixed.get(key := tuple(slots))
        if fixed is None:
            if len(self._fixed) >= MAX_KEPT:
                self._fixed.clear()
            fixed = self._fixed[key] = self._fixed_rows(slots)
        return SamplingRows(
            fixed,
            position=np.asarray(positions),
            penalties=self._adjustments.penalties(slots, ahead),
            banned=self._banned_tokens.of(slots, positions, ahead, masks),
            masks=masks,
        )

    def read_logits(self, slots: list[int], masks: GrammarMasks | None) -> TokenMask | None:
        """Returns of which ids the logits are read, of the rows that sample by a grammar alone: those that it allows.
        Rows that report log probabilities, or whose logits plugins see, are read whole, as all others are."""
        if masks is None or not len(masks.rows):
            return None
        rows, bits = masks.rows, masks.bits
        if not self._whole.isdisjoint(slots):
            is_part = np.array([slots[row] not in self._whole for row in rows.tolist()])
            rows, bits = rows[is_part], bits[is_part]
        return TokenMask(torch.from_numpy(rows), torch.from_numpy(bits))

    def _fixed_rows(self, slots: list[int]) -> SamplingParamRows:
        """Returns the parameters that stay as long as the same slots sample."""
        at = np.array(slots)
        return sampling_rows(
            self._floats[at],
            self._ints[at],
            biases=self._adjustments.biases(slots),
            allowed=self._adjustments.allowed(slots),
            logprobs=self._logprobs(slots),
        )

    def _logprobs(self, slots: list[int]) -> LogprobRows | None:
        nums = self._num_logprobs[slots]
        rows = np.flatnonzero(nums >= 0)
        if not len(rows):
            return None
        ids = self._logprob_ids
        wanted = {at: ids[slots[row]] for at, row in enumerate(rows.tolist()) if slots[row] in ids} if ids else {}
        return LogprobRows(rows, nums[rows], wanted)
