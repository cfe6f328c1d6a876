"""Schedules drafted tokens: which sequences get drafts, how many of them a step verifies, and which are kept.

A draft is kept if and only if it equals the token that is sampled in its place, so drafts change time and nothing else.
They use only the budget and blocks that other work leaves: they preempt no sequence, and the resources of rejected
drafts are freed in the same step. Independent of the proposer.
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

PAYBACK = 4  # tokens that a proposer may have to read for each token still to be generated
REST_STEPS = 4  # steps without drafts, once drafting pays for no sequence: these may be planned ahead
HEED_EVERY = 4  # one in so many steps is measured while drafting rests
MAX_NEWS = 16  # new tokens of a sequence that a proposer reads at no extra cost


class DraftScheduler:
    """Schedules drafts for the next step, and verifies those of the step in flight."""

    def __init__(
        self, state: SchedulerState, outputs: Outputs, controller: SpeculationController | None, max_width: int = 1
    ) -> None:
        """`controller`: chooses width and length; without one, drafts are as wide, and then as long, as they may be."""
        self.stats = DraftStats()
        self.offered: list[Sequence] = []  # sequences that have drafts for the next step
        self._state = state
        self._outputs = outputs
        self._controller = controller
        self._max_width = max_width
        self.num_resting = 0  # steps to come without drafts
        self._is_resting = False
        self._asked: list[Sequence] = []
        self._grown: list[tuple[Sequence, int]] = []  # sequences with blocks for drafts, and their `num_places` then

    @property
    def is_pending(self) -> bool:
        """Whether the next plan must call `take`."""
        return bool(self.offered or self._grown)

    def rests(self) -> bool:
        """Whether drafting pays for no sequence in the next step, whichever run. Hardly any other drafting code runs
        then: after a pass over all weights the processor caches are cold, and every call is slow."""
        if self._controller is None:
            return False
        num_ahead = REST_STEPS - self.num_resting if self._is_resting else 0  # steps that were planned without drafts
        self._is_resting = self._controller.rests(1 + num_ahead)
        if self._is_resting:
            self.num_resting = REST_STEPS
        return self._is_resting

    def note_unasked(self) -> None:
        """Counts a step that was planned without asking for drafts."""
        self.num_resting -= 1

    def asks(self, budget: int, *, grow: bool) -> list[DraftRequest]:
        """Returns draft requests for sequences one token behind. None if prompts fill a step of `budget` tokens.
        `grow`: allocates blocks for all drafts but the last, as far as other sequences do not need them in the next
        step."""
        self._asked = []
        missing = [one.num_missing for one in self._state.running if one.num_missing > 0]
        remaining = budget - sum(missing)
        due = [one for one in self._state.running if _is_due(one)] if remaining > 0 else []
        asks: list[DraftRequest] = []
        if not due:
            return asks
        able = [one for one in due if not (grow and _is_too_late(one))]  # not worth reading first
        wishes = self._wishes(able, missing)
        self.num_resting = 0 if any(wishes) else REST_STEPS
        width = self._max_width if self._controller is None else self._controller.width
        spare = self._num_spare() if grow and any(wishes) else 0
        for one, wish in zip(able, wishes, strict=True):
            limit = _limit(one) if wish else 0
            wide = _width(one, width, limit)
            num = min(wish, limit // wide, remaining)
            if grow and num > 0:
                num, taken = self._grow_ahead(one, num, spare)
                spare -= taken
            if num > 0:
                self._asked.append(one)
                asks.append(_ask(one, num, wide))
        return asks

    def offer(self, asks: Several[DraftRequest], proposals: Several[Several[int] | DraftTree], seconds: float) -> None:
        """Takes the proposals for the last `asks`, in their order. `seconds`: the time it took to draft them."""
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

    def take(self, remaining: int, step: int) -> dict[Sequence, int]:
        """Returns how many drafts each row of the step verifies, `room` tokens at most in all. Spends credit for all of
        them, as all may be kept."""
        nums: dict[Sequence, int] = {}
        offered, self.offered = self.offered, []
        for one in offered:
            drafting = one.drafting
            assert drafting is not None
            is_row = one.state is SequenceStatus.RUNNING and one.last_step == step
            num = min(len(drafting.ids), remaining, _limit(one)) if is_row else 0
            if num > 0:
                num = self._grow(one, num)
            del drafting.ids[num:], drafting.parents[num:]
            if is_chain(drafting.parents):
                drafting.parents.clear()
            if num > 0:
                nums[one] = num
                remaining -= num
                if one.group.credit is not None:
                    one.group.credit -= num
        grown, self._grown = self._grown, []
        for one, place in grown:
            if one.num_places == place and one.state is SequenceStatus.RUNNING and one not in nums:
                self._state.shrink(one, one.num_begun + (one.last_step == step))
        return nums

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """Reports a computed step to the controller. Of a pure decode step it reports the time (of one in `HEED_EVERY`
        while drafting rests), else the number of rows that ended their prompt."""
        num_rows = len(plan.slots)
        if self._controller is None:
            return
        if plan.num_tokens - sum(plan.drafts.values()) != num_rows:
            self._controller.joined(_num_new(plan), num_rows)
        elif not self._is_resting or not plan.step % HEED_EVERY:
            self._controller.stepped(num_rows, plan.num_tokens, seconds)

    def verify(self, sequence: Sequence, num: int, run: VerifiedDrafts, now: float, events: list[Sampled]) -> None:
        """Verifies the `num` drafts of a computed row: keeps the tokens sampled behind those that are right."""
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
        # As after any row: all tokens are computed but the one sampled last.
        sequence.tokens.extend(run.token_ids[:kept])
        sequence.num_computed += kept
        self._state.fill(sequence)
        self._state.shrink(sequence, sequence.num_computed)
        self._outputs.advance_run(sequence, AddedTokens(kept, run.logprobs[:kept], num, min(kept, right)), now, events)
        self._state.give_back(group, num + 1 - kept)

    def _verify_tree(self, drafting: Drafting, run: VerifiedDrafts) -> int:
        """Returns how many drafts of a tree are kept. The controller gets its first branch as a chain: the first draft,
        the first behind that and so on. Drafts in place of one of these are alternatives."""
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
        """Returns how many drafts pay for each of `able`, in a step whose rows miss `missing` tokens."""
        if self._controller is None:
            return [MAX_DRAFT_TOKENS] * len(able)
        records = [one.drafting.record for one in able if one.drafting is not None]
        num_rows, unread = missing.count(1), [_unread(one) for one in able]
        return self._controller.choose(records, num_rows, unread, is_alone=num_rows == len(missing))

    def _num_spare(self) -> int:
        """Returns the free blocks that are left when every running sequence computes all tokens that it misses."""
        cache = self._state.cache
        wanted = 0
        for one in self._state.running:
            end = cache.sizes.blocks_for(one.num_begun + max(0, one.num_missing))
            wanted += max(0, end - len(one.table.blocks)) + (one.table.shared_tail >= 0)
        return cache.num_free - wanted

    def _grow_ahead(self, sequence: Sequence, num: int, spare: int) -> tuple[int, int]:
        """Allocates blocks for `num` drafts but the last before they are made, from `spare` blocks. Returns the number
        of drafts that fit, and the blocks taken beside the sequence's own next one."""
        cache, num_tokens = self._state.cache, len(sequence.tokens)
        own = cache.sizes.blocks_for(num_tokens)
        more = cache.sizes.blocks_for(num_tokens + num - 1) - own
        if more > spare:
            more, num = 0, min(num, own * cache.block_size - num_tokens + 1)
        if spare < 0 or not cache.grow(sequence.table, num_tokens + num - 1):
            return 0, 0
        self._grown.append((sequence, sequence.num_places))
        return num, more

    def _grow(self, sequence: Sequence, num: int) -> int:
        """Allocates blocks for `num` drafts behind the row's own token; returns the number for which they suffice."""
        cache, first = self._state.cache, sequence.num_begun + 1
        if not cache.grow(sequence.table, first + num):
            num = min(num, len(sequence.table.blocks) * cache.block_size - first)
        sequence.capacity = len(sequence.table.blocks) * cache.block_size
        return num


def _num_new(plan: StepPlan) -> int:
    """Returns the number of rows that have computed a prompt to its end."""
    rows = enumerate(zip(plan.query_lens, plan.samples, strict=True))
    return sum(samples and num > 1 and i not in plan.drafts for i, (num, samples) in rows)


def _is_due(sequence: Sequence) -> bool:
    if sequence.drafting is None or sequence.group.holds_back:
        return False
    return len(sequence.tokens) - sequence.num_begun == 1 and sequence.state is SequenceStatus.RUNNING


def _news(sequence: Sequence) -> int:
    """Returns the tokens that the proposer must read before it drafts; 0 up to `MAX_NEWS`, which cost nothing extra."""
    assert sequence.drafting is not None
    news = len(sequence.tokens) - max(sequence.drafting.num_seen, sequence.drafting.first)
    return news if news > MAX_NEWS else 0


def _unread(sequence: Sequence) -> float:
    """Returns the tokens to read before drafting, per token that is still to be generated."""
    return _news(sequence) / max(1, sequence.group.max_tokens - sequence.num_output)


def _catch_up(sequence: Sequence) -> int:
    """Records how far the proposer has read; returns how many tokens it had to read, 0 up to `MAX_NEWS`."""
    drafting = sequence.drafting
    assert drafting is not None
    memory = drafting.memory
    drafting.num_seen = len(sequence.tokens) - memory.num_unread
    return memory.num_read if memory.num_read > MAX_NEWS else 0


def _is_too_late(sequence: Sequence) -> bool:
    """Whether too few tokens are still to come for reading the sequence to pay."""
    return _unread(sequence) > PAYBACK


def _limit(sequence: Sequence) -> int:
    """Returns how many drafts could be kept at most: one token is sampled in any case, and no limit may be exceeded."""
    group, drafting = sequence.group, sequence.drafting
    assert drafting is not None
    limit = min(drafting.limit, group.max_tokens - sequence.num_output - 1)
    if group.credit is not None:
        limit = min(limit, group.credit)
    return limit


def _width(sequence: Sequence, most: int, limit: int) -> int:
    """Returns how many drafts may follow the same token: one under a grammar, as its matcher follows one chain only."""
    return 1 if sequence.group.params.grammar else max(1, min(most, limit))


def _parts(draft: Several[int] | DraftTree) -> tuple[list[int], list[int]]:
    """Returns the tokens of a draft, and their parents if it is a tree."""
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
        is_trimmed=sequence.table.trimmed[0] > 0,
        width=width,
        num_prompt=len(sequence.group.prompt),
    )
