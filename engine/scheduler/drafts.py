"""Drafted tokens: who may bring some, how many of them a step verifies, and which are kept.

A draft is kept if and only if it equals the token that is sampled in its place, so drafts change time and nothing else.
They take what everybody else leaves: they displace nobody, and what was wrong is given back in the same step. Knows no
proposer.
"""

from collections.abc import Sequence as Several

from sluice_server.engine.plan import DraftRequest, DraftTree, StepPlan, VerifiedDrafts, num_accepted
from sluice_server.engine.request import MAX_DRAFT_TOKENS
from sluice_server.engine.scheduler.draft_stats import DraftStats
from sluice_server.engine.scheduler.events import Sampled
from sluice_server.engine.scheduler.outputs import AddedTokens, Outputs
from sluice_server.engine.scheduler.sequence import Drafting, Sequence, SequenceStatus
from sluice_server.engine.scheduler.state import SchedulerState
from sluice_server.engine.speculation.controller import SpeculationController
from sluice_server.engine.speculation.trees import MOST_DRAFTS, first_branch, follow, is_chain

PAYBACK = 4  # tokens that a proposer may have to read, of its own model, for each that is still to come
REST_STEPS = 4  # in which nobody is asked, once nobody is worth a draft: these may be planned ahead
HEED_EVERY = 4  # steps of which one is measured while nobody is asked
MAX_NEWS = 16  # tokens since a proposer was last asked about a sequence, beyond which it has to read


class DraftScheduler:
    """Drafts of the step to come and of the one in flight."""

    def __init__(
        self, state: SchedulerState, outputs: Outputs, controller: SpeculationController | None, max_width: int = 1
    ) -> None:
        """Without a controller drafts are as wide, and then as long, as they may be."""
        self.stats = DraftStats()
        self.offered: list[Sequence] = []  # that have drafts for the next step
        self._state = state
        self._outputs = outputs
        self._controller = controller
        self._max_width = max_width
        self.num_resting = 0  # steps to come in which nobody needs to be asked
        self._is_resting = False
        self._asked: list[Sequence] = []
        self._grown: list[tuple[Sequence, int]] = []  # whose tables have room for drafts, and which tables these are

    @property
    def is_pending(self) -> bool:
        """Whether the next plan must `take`."""
        return bool(self.offered or self._grown)

    def rests(self) -> bool:
        """Whether nobody is worth a draft in the next step, whoever runs. All that hardly a step does then: behind a
        model that has just been read from end to end, every call more is one that the processor has forgotten."""
        if self._controller is None:
            return False
        num_ahead = REST_STEPS - self.num_resting if self._is_resting else 0  # that were planned without asking
        self._is_resting = self._controller.rests(1 + num_ahead)
        if self._is_resting:
            self.num_resting = REST_STEPS
        return self._is_resting

    def note_unasked(self) -> None:
        """A step was planned without asking."""
        self.num_resting -= 1

    def asks(self, budget: int, *, grow: bool) -> list[DraftRequest]:
        """Of sequences one token behind, while prompts leave room in a step of `budget` tokens. `grow`: with blocks for
        all drafts but the last, as far as nobody else needs them in the next step."""
        self._asked = []
        missing = [one.num_missing for one in self._state.running if one.num_missing > 0]
        room = budget - sum(missing)
        due = [one for one in self._state.running if _is_due(one)] if room > 0 else []
        asks: list[DraftRequest] = []
        if not due:
            return asks
        able = [one for one in due if not (grow and _is_too_late(one))]  # who would have to be read first
        wishes = self._wishes(able, missing)
        self.num_resting = 0 if any(wishes) else REST_STEPS
        width = self._max_width if self._controller is None else self._controller.width
        spare = self._num_spare() if grow and any(wishes) else 0
        for one, wish in zip(able, wishes, strict=True):
            limit = _limit(one) if wish else 0
            wide = _width(one, width, limit)
            num = min(wish, limit // wide, room)
            if grow and num > 0:
                num, taken = self._grow_ahead(one, num, spare)
                spare -= taken
            if num > 0:
                self._asked.append(one)
                asks.append(_ask(one, num, wide))
        return asks

    def offer(self, asks: Several[DraftRequest], proposals: Several[Several[int] | DraftTree], seconds: float) -> None:
        """Answers to the last `asks`, in their order, and how long it took to find them."""
        drafts = [_parts(one) for one in proposals]
        num_read = sum(map(_catch_up, self._asked))
        if self._controller is not None and asks:
            asked = [ask.num for ask in asks if not ask.memory.num_unread]
            self._controller.drafted(asked, seconds, num_read=num_read)
            for one, ask, (ids, _) in zip(self._asked, asks, drafts, strict=True):
                if one.drafting is not None and not ask.memory.num_unread:
                    self._controller.answered(one.drafting.record, ask.num * ask.width, len(ids))
        for one, (ids, parents) in zip(self._asked, drafts, strict=True):
            assert one.drafting is not None
            if ids:
                one.drafting.ids, one.drafting.parents = ids, parents
                self.offered.append(one)
        self._asked = []

    def take(self, room: int, step: int) -> dict[Sequence, int]:
        """How many drafts each row of the step verifies: `room` tokens at most. Credit for all of them is spent, as all
        may be kept."""
        nums: dict[Sequence, int] = {}
        offered, self.offered = self.offered, []
        for one in offered:
            drafting = one.drafting
            assert drafting is not None
            is_row = one.state is SequenceStatus.RUNNING and one.last_step == step
            num = min(len(drafting.ids), room, _limit(one)) if is_row else 0
            if num > 0:
                num = self._grow(one, num)
            del drafting.ids[num:], drafting.parents[num:]
            if is_chain(drafting.parents):
                drafting.parents.clear()
            if num > 0:
                nums[one] = num
                room -= num
                if one.group.credit is not None:
                    one.group.credit -= num
        grown, self._grown = self._grown, []
        for one, place in grown:
            if one.num_places == place and one.state is SequenceStatus.RUNNING and one not in nums:
                self._state.shrink(one, one.num_computed + (one.last_step == step))
        return nums

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long: worth knowing if it was of decoding rows alone, and now and then while all rest."""
        num_rows = len(plan.slots)
        if self._controller is None:
            return
        if plan.num_tokens - sum(plan.drafts.values()) != num_rows:
            self._controller.joined(_num_new(plan), num_rows)
        elif not self._is_resting or not plan.step % HEED_EVERY:
            self._controller.stepped(num_rows, plan.num_tokens, seconds)

    def verify(self, sequence: Sequence, num: int, run: VerifiedDrafts, now: float, events: list[Sampled]) -> None:
        """A row with `num` drafts has been computed: keep what was sampled behind those that are right."""
        group, drafting = sequence.group, sequence.drafting
        assert drafting is not None and len(drafting.ids) == num, "drafts changed while they were verified"
        if drafting.parents:
            right = self._verify_tree(drafting, run)
        else:
            right = num_accepted(drafting.ids, run.token_ids)
            if self._controller is not None:
                self._controller.verified(drafting.record, num, right)
        drafting.ids.clear()
        drafting.parents.clear()
        kept = self._outputs.num_kept(sequence, run.token_ids[: right + 1])
        group.drafts.record(num, min(kept, right))
        self.stats.record(num, min(kept, right))
        # As behind any row: all that exists is computed but the token sampled last.
        sequence.tokens.extend(run.token_ids[:kept])
        sequence.num_computed += kept
        self._state.fill(sequence)
        self._state.shrink(sequence, sequence.num_computed)
        self._outputs.advance_run(sequence, AddedTokens(kept, run.logprobs[:kept], num, min(kept, right)), now, events)
        self._state.give_back(group, num + 1 - kept)

    def _verify_tree(self, drafting: Drafting, run: VerifiedDrafts) -> int:
        """How many drafts of a tree stand. Its first draft, the first behind that and so on are what a chain would be;
        who takes the place of one of these is an alternative to it."""
        parents = drafting.parents
        path = follow(drafting.ids, parents, run.token_ids)
        if self._controller is not None:
            first = first_branch(parents)
            right = next((i for i, node in enumerate(path) if first[i : i + 1] != [node]), len(path))
            self._controller.verified(drafting.record, len(first), right)
            parent = first[right - 1] if right else -1
            if right < len(first) and parents.count(parent) > 1:
                self._controller.branched(is_met=len(path) > right)
        return len(path)

    def _wishes(self, able: Several[Sequence], missing: list[int]) -> list[int]:
        """How many drafts each is worth in a step whose rows miss so many tokens."""
        if self._controller is None:
            return [MAX_DRAFT_TOKENS] * len(able)
        records = [one.drafting.record for one in able if one.drafting is not None]
        num_rows, unread = missing.count(1), [_unread(one) for one in able]
        return self._controller.choose(records, num_rows, unread, is_alone=num_rows == len(missing))

    def _num_spare(self) -> int:
        """Blocks that are free even when everybody who runs computes all that it misses."""
        cache = self._state.cache
        wanted = 0
        for one in self._state.running:
            end = cache.blocks_for(one.num_computed + max(0, one.num_missing))
            wanted += max(0, end - len(one.table.blocks)) + (one.table.shared_tail >= 0)
        return cache.pool.num_free - wanted

    def _grow_ahead(self, sequence: Sequence, num: int, spare: int) -> tuple[int, int]:
        """Room for `num` drafts but the last before they are made, from `spare` blocks, or for as many as there is: how
        many, and the blocks that this took beside the sequence's own next one."""
        cache, num_tokens = self._state.cache, len(sequence.tokens)
        own = cache.blocks_for(num_tokens)
        more = cache.blocks_for(num_tokens + num - 1) - own
        if more > spare:
            more, num = 0, min(num, own * cache.block_size - num_tokens + 1)
        if spare < 0 or not cache.grow(sequence.table, num_tokens + num - 1):
            return 0, 0
        self._grown.append((sequence, sequence.num_places))
        return num, more

    def _grow(self, sequence: Sequence, num: int) -> int:
        """Room for `num` drafts behind the row's own token, or for as many as there is."""
        cache, first = self._state.cache, sequence.num_computed + 1
        if not cache.grow(sequence.table, first + num):
            num = min(num, len(sequence.table.blocks) * cache.block_size - first)
        sequence.room = len(sequence.table.blocks) * cache.block_size
        return num


def _num_new(plan: StepPlan) -> int:
    """Rows that have computed a prompt to its end."""
    rows = enumerate(zip(plan.query_lens, plan.samples, strict=True))
    return sum(samples and num > 1 and i not in plan.drafts for i, (num, samples) in rows)


def _is_due(sequence: Sequence) -> bool:
    if sequence.drafting is None or sequence.group.holds_back:
        return False
    return len(sequence.tokens) - sequence.num_computed == 1 and sequence.state is SequenceStatus.RUNNING


def _news(sequence: Sequence) -> int:
    """Tokens that have to be read before a draft; those of the last steps are none, whatever is drafted reads such."""
    assert sequence.drafting is not None
    news = len(sequence.tokens) - sequence.drafting.num_seen
    return news if news > MAX_NEWS else 0


def _unread(sequence: Sequence) -> float:
    """These per token still to come."""
    return _news(sequence) / max(1, sequence.group.max_tokens - sequence.num_output)


def _catch_up(sequence: Sequence) -> int:
    """The proposer has answered: how many tokens it had to read for that."""
    drafting = sequence.drafting
    assert drafting is not None
    memory = drafting.memory
    drafting.num_seen = len(sequence.tokens) - memory.num_unread
    return memory.num_read if memory.num_read > MAX_NEWS else 0


def _is_too_late(sequence: Sequence) -> bool:
    """Whether so little is still to come that reading what there is would not pay."""
    return _unread(sequence) > PAYBACK


def _limit(sequence: Sequence) -> int:
    """Drafts at most that could be kept: one token is sampled in any case, and no limit may be passed."""
    group, drafting = sequence.group, sequence.drafting
    assert drafting is not None
    limit = min(drafting.limit, group.max_tokens - sequence.num_output - 1)
    if group.credit is not None:
        limit = min(limit, group.credit)
    return limit


def _width(sequence: Sequence, most: int, limit: int) -> int:
    """Drafts at most that may follow the same token: a grammar follows one chain only."""
    return 1 if sequence.group.params.grammar else max(1, min(most, limit))


def _parts(draft: Several[int] | DraftTree) -> tuple[list[int], list[int]]:
    """Its tokens, and their parents where it is a tree."""
    if isinstance(draft, DraftTree):
        return list(draft.token_ids[:MOST_DRAFTS]), list(draft.parents[:MOST_DRAFTS])
    return list(draft), []


def _ask(sequence: Sequence, num: int, width: int) -> DraftRequest:
    assert sequence.drafting is not None
    return DraftRequest(
        tokens=sequence.tokens,
        blocks=sequence.table.blocks,
        params=sequence.group.params,
        output_index=sequence.index,
        num=num,
        memory=sequence.drafting.memory,
        names=sequence.table.names,
        place=sequence.num_places,
        is_trimmed=sequence.table.num_trimmed > 0,
        width=width,
    )
