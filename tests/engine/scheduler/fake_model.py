"""A model that is a hash function, with a runner that executes plans: slots, block tables and a memory of blocks.

A cell of the memory holds the hash chain of all tokens up to its position, computed from the cell before it. A token
is H(chain, seed, output, position): if a cell was lost, stale or another sequence's, the token is wrong.
"""

import random
from collections import deque
from collections.abc import Sequence

from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.prefix import is_of
from sluice_server.engine.plan import (
    IN_FLIGHT,
    DraftRequest,
    DraftTree,
    StepPlan,
    StepResult,
    TokenLogprob,
    VerifiedDrafts,
)
from sluice_server.engine.request import Pooling, SamplingParams

VOCAB = 50


def extend(chain: int, token: int) -> int:
    """The hash chain after one more token."""
    return hash((chain, token))


def chain_of(tokens: Sequence[int]) -> int:
    """The hash chain after all tokens."""
    chain = 0
    for token in tokens:
        chain = hash((chain, token))
    return chain


def token_after(chain: int, seed: int, output: int, position: int) -> int:
    """The token that the model samples at `position` after the chain."""
    return hash((chain, seed, output, position)) % VOCAB


def logprob_after(chain: int, token: int) -> float:
    """A log probability of the token after the chain."""
    return -1.0 - (hash((chain, token, 1)) % 1009) / 500


def candidates_after(chain: int, num: int) -> TokenLogprob:
    """The `num` likeliest tokens after the chain."""
    first = hash((chain, 77)) % VOCAB
    ids = tuple((first + 7 * i) % VOCAB for i in range(min(num, VOCAB)))
    return TokenLogprob(0.0, 1, ids, tuple(-0.3 - 0.37 * i for i in range(len(ids))))


def sample(prompt: tuple[int, ...], params: SamplingParams, output: int, eos: int) -> list[int]:
    """All tokens of an output."""
    chain, ids = chain_of(prompt), list[int]()
    while len(ids) < params.max_tokens:
        ids.append(token_after(chain, params.seed, output, len(prompt) + len(ids)))
        chain = extend(chain, ids[-1])
        if ids[-1] == eos and not params.ignore_eos:
            break
    return ids


def vector_of(tokens: Sequence[int], pooling: Pooling) -> bytes:
    """The vector of a pooled prompt: the last chain, or the sum of the chains after every token."""
    chain, total = 0, 0
    for token in tokens:
        chain = extend(chain, token)
        total += chain
    return str(total if pooling is Pooling.MEAN else chain).encode()


class FakeProposer:
    """A proposer that drafts the model's tokens, and sometimes other ones."""

    def __init__(self, rng: random.Random, quality: float) -> None:
        self.quality = quality  # probability that a draft is right
        self._rng = rng

    def propose(self, ask: DraftRequest) -> list[int] | DraftTree:
        """At most as many drafts as requested; often a tree if trees are allowed."""
        if ask.width > 1 and self._rng.random() < 0.8:
            return self._branch(ask)
        return self._chain(ask)

    def _branch(self, ask: DraftRequest) -> DraftTree:
        """A random tree with right and wrong drafts anywhere."""
        ids, parents, chains = list[int](), list[int](), [chain_of(ask.tokens)]
        depths = [0]
        for i in range(self._rng.randrange(ask.num * ask.width + 1)):
            parent = self._rng.randrange(max(-1, i - 4), i)
            right = token_after(
                chains[parent + 1], ask.params.seed, ask.output_index, len(ask.tokens) + depths[parent + 1]
            )
            is_right = self._rng.random() < self.quality
            ids.append(right if is_right else (right + self._rng.randrange(1, VOCAB)) % VOCAB)
            parents.append(parent)
            chains.append(extend(chains[parent + 1], ids[-1]))
            depths.append(depths[parent + 1] + 1)
        return DraftTree(tuple(ids), tuple(parents))

    def _chain(self, ask: DraftRequest) -> list[int]:
        num = self._rng.randrange(ask.num + 1)
        if not num:
            return []
        known, chain = ask.memory.state if isinstance(ask.memory.state, tuple) else (0, 0)
        for token in ask.tokens[known:]:
            chain = extend(chain, token)
        ask.memory.state = len(ask.tokens), chain
        ids = list[int]()
        for position in range(len(ask.tokens), len(ask.tokens) + num):
            right = token_after(chain, ask.params.seed, ask.output_index, position)
            ids.append(right if self._rng.random() < self.quality else (right + self._rng.randrange(1, VOCAB)) % VOCAB)
            chain = extend(chain, ids[-1])
        return ids


class FakeRunner:
    """Executes plans and moves blocks; its disk is slow, and sometimes loses or damages blocks."""

    def __init__(
        self, num_slots: int, num_blocks: int, block_size: int, num_host: int, rng: random.Random, num_groups: int = 1
    ) -> None:
        self._size = block_size
        self._cells: list[int] = [0] * ((num_blocks + 1) * block_size)
        self._null = num_blocks
        self._host: list[list[int]] = [[0] * block_size for _ in range(num_host)]
        self._disk: dict[bytes, list[int]] = {}
        self._under_way: deque[tuple[Move, list[int]]] = deque()
        self._rng = rng
        self._groups = range(num_groups)
        self._tables: list[list[list[int]]] = [self._no_blocks() for _ in range(num_slots)]
        self._rows: list[tuple[SamplingParams, int]] = [(SamplingParams(), 0)] * num_slots
        self._sampled = [-1] * num_slots  # what each slot sampled last
        self._pooled: dict[int, tuple[Pooling, dict[int, int]]] = {}  # by slot: the chains computed, by position

    @property
    def is_moving(self) -> bool:
        """Whether transfers with the disk are under way."""
        return bool(self._under_way)

    def move(self, moves: list[Move]) -> None:
        """Executes the moves that need no disk and begins the others."""
        for move in moves:
            if move.kind is MoveKind.COPY:
                self._put(move.target, self._block(move.source))
            elif move.kind is MoveKind.SAVE:
                self._host[move.target] = self._block(move.source)
            elif move.kind is MoveKind.RESTORE:
                self._put(move.target, self._host[move.source])
            elif move.kind is MoveKind.WIPE:
                self._put(move.target, [-3] * self._size)
            elif move.kind is MoveKind.WIPE_SLOT:
                self._host[move.target] = [-3] * self._size
            else:
                is_kept = move.kind is MoveKind.KEEP
                source = (
                    self._block(move.source)
                    if is_kept
                    else self._host[move.source]
                    if move.kind is MoveKind.WRITE
                    else []
                )
                self._under_way.append((move, list(source)))

    def moved(self) -> list[tuple[Move, bool]]:
        """The transfers that have ended since the last call, in order."""
        ended = []
        for _ in range(self._rng.randrange(len(self._under_way) + 1)):
            move, cells = self._under_way.popleft()
            is_good = self._rng.random() > 0.15
            if move.kind is MoveKind.REMOVE:
                self._disk.pop(move.name, None)
                continue
            if move.kind is MoveKind.CLEAR:
                self._disk = {name: kept for name, kept in self._disk.items() if not is_of(name, move.name)}
            if move.kind in (MoveKind.WRITE, MoveKind.KEEP) and is_good:
                self._disk[move.name] = cells
            elif move.kind is MoveKind.READ:
                # What is read before it is known to be good lies in its slot already.
                self._host[move.target] = self._disk.get(move.name, [-1] * self._size) if is_good else [-1] * self._size
                is_good = is_good and move.name in self._disk
            ended.append((move, is_good))
        return ended

    def lose(self, blocks: Sequence[int]) -> None:
        """Loses the contents of blocks, whose memory was given back."""
        for block in blocks:
            self._put(block, [-2] * self._size)

    def place(self, plan: StepPlan) -> None:
        """Reset and extend the rows of slots."""
        for placement in plan.placements:
            self._tables[placement.slot] = self._no_blocks()
            self._rows[placement.slot] = (placement.params, placement.output_index)
            if placement.pooling is not None:
                _, chains = self._pooled.get(placement.slot, (None, {}))
                self._pooled[placement.slot] = placement.pooling, chains
        for run in plan.new_blocks:
            table = self._tables[run.slot][run.group]
            assert run.first <= len(table), "a hole in a block table"
            table[run.first : run.first + len(run.blocks)] = run.blocks

    def compute(self, plan: StepPlan, failed: frozenset[int]) -> StepResult:
        """Write the cells of the plan's rows, then sample."""
        assert len(set(plan.slots)) == len(plan.slots), "a slot computes twice in one step"
        assert sorted(plan.query_lens, key=lambda num: num > 1) == plan.query_lens, "rows of one token come first"
        ids: list[int] = []
        logprobs: dict[int, TokenLogprob] = {}
        runs: dict[int, VerifiedDrafts] = {}
        pooled: dict[int, bytes] = {}
        at, written = 0, set[int]()
        for i, slot in enumerate(plan.slots):
            start, num, drafted = plan.starts[i], plan.query_lens[i], plan.drafts.get(i, 0)
            assert num > drafted and (plan.samples[i] or not drafted), "drafts behind a token that is not the newest"
            if i in plan.parents:
                assert num == 1 + drafted and len(plan.parents[i]) == drafted, "a tree of other tokens"
                runs[i] = self._compute_tree(slot, start, plan.token_ids[at : at + num], plan.parents[i], written)
                ids.append(runs[i].token_ids[0])
                self._sampled[slot] = ids[-1]
                at += num
                continue
            chain = self._read(slot, start - 1) if start else 0
            if i in plan.pools and not start:
                self._pooled[slot][1].clear()
            run: list[tuple[int, TokenLogprob]] = []
            for position in range(start, start + num):
                chain = hash((chain, self._sampled[slot] if plan.token_ids[at] == IN_FLIGHT else plan.token_ids[at]))
                at += 1
                self._write(slot, position, chain, written)
                if i in plan.pools:
                    self._pooled[slot][1][position] = chain
                if plan.samples[i] and position >= start + num - 1 - drafted:
                    run.append(self._sample(slot, chain, position + 1))
            if plan.pools.get(i):
                kind, chains = self._pooled[slot]
                pooled[i] = str(sum(chains.values()) if kind is Pooling.MEAN else chain).encode()
            ids.append(run[0][0] if run else -1)
            self._sampled[slot] = ids[-1]
            if self._rows[slot][0].logprobs >= 0 and run and not drafted:
                logprobs[i] = run[0][1]
            if drafted:
                found = tuple(logprob for _, logprob in run) if self._rows[slot][0].logprobs >= 0 else ()
                runs[i] = VerifiedDrafts(tuple(token for token, _ in run), found)
        return StepResult(ids, failed, logprobs, runs, pooled=pooled)

    def _compute_tree(
        self, slot: int, start: int, tokens: list[int], parents: tuple[int, ...], written: set[int]
    ) -> VerifiedDrafts:
        """Writes the cells of a tree in token order, each after its parent's; then moves the accepted ones together."""
        before = self._read(slot, start - 1) if start else 0
        chains = [extend(before, tokens[0])]
        for token, parent in zip(tokens[1:], parents, strict=True):
            chains.append(extend(chains[1 + parent], token))
        for i, chain in enumerate(chains):
            self._write(slot, start + i, chain, written)
        run, at = [self._sample(slot, chains[0], start + 1)], 0
        for i, parent in enumerate(parents, 1):
            if 1 + parent == at and tokens[i] == run[-1][0]:
                self._write(slot, start + len(run), chains[i], set())
                run.append(self._sample(slot, chains[i], start + len(run) + 1))
                at = i
        found = tuple(logprob for _, logprob in run) if self._rows[slot][0].logprobs >= 0 else ()
        return VerifiedDrafts(tuple(token for token, _ in run), found)

    def _sample(self, slot: int, chain: int, position: int) -> tuple[int, TokenLogprob]:
        params, output = self._rows[slot]
        token = token_after(chain, params.seed, output, position)
        if params.beam_width:
            return token, candidates_after(chain, params.logprobs)
        return token, TokenLogprob(logprob_after(chain, token), 1)

    def chains(self, slot: int, first: int, end: int, group: int = 0) -> list[int]:
        """The contents of a group's cells of the slot at positions [first, end)."""
        return [self._cells[self._cell(slot, position, group)] - group for position in range(first, end)]

    def _no_blocks(self) -> list[list[int]]:
        return [[] for _ in self._groups]

    def _read(self, slot: int, position: int) -> int:
        """The contents of the slot's cells at a position, which are the same in all groups."""
        first, *others = (self.chains(slot, position, position + 1, group)[0] for group in self._groups)
        assert all(one == first for one in others), "groups of layers disagree"
        return first

    def _write(self, slot: int, position: int, chain: int, written: set[int]) -> None:
        for group in self._groups:
            cell = self._cell(slot, position, group)
            assert cell not in written, "two rows write one cell"
            written.add(cell)
            self._cells[cell] = chain + group  # each group holds something else

    def _block(self, block: int) -> list[int]:
        return self._cells[block * self._size : (block + 1) * self._size]

    def _put(self, block: int, cells: list[int]) -> None:
        self._cells[block * self._size : (block + 1) * self._size] = cells

    def _cell(self, slot: int, position: int, group: int) -> int:
        table = self._tables[slot][group]
        assert position // self._size < len(table), "computes in a block that it does not have"
        assert table[position // self._size] != self._null, "touches a block that was given back"
        return table[position // self._size] * self._size + position % self._size
