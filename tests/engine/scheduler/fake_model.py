"""A model that is a hash, behind a runner that knows nothing but plans: slots, block tables and a memory of blocks.

A cell of the memory holds the chain of all tokens up to its position, as whoever wrote it read it from the cell before.
A token is H(chain, seed, output, position): if any cell was lost, stale or somebody else's, the token is wrong.
"""

from engine.plan import Plan, StepResult, TokenLogprob
from engine.request import SamplingParams

VOCAB = 50


def extend(chain: int, token: int) -> int:
    """The chain behind one more token."""
    return hash((chain, token))


def chain_of(tokens: list[int] | tuple[int, ...]) -> int:
    """The chain behind all of them."""
    chain = 0
    for token in tokens:
        chain = hash((chain, token))
    return chain


def token_after(chain: int, seed: int, output: int, position: int) -> int:
    """The token that the model samples at `position` behind the chain."""
    return hash((chain, seed, output, position)) % VOCAB


def logprob_after(chain: int, token: int) -> float:
    """A log probability of the token behind the chain."""
    return -1.0 - (hash((chain, token, 1)) % 1009) / 500


def candidates_after(chain: int, num: int) -> TokenLogprob:
    """The `num` likeliest tokens behind the chain."""
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


class FakeRunner:
    """Computes plans."""

    def __init__(self, num_slots: int, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._cells: list[int] = [0] * (num_blocks * block_size)
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]
        self._rows: list[tuple[SamplingParams, int]] = [(SamplingParams(), 0)] * num_slots

    def place(self, plan: Plan) -> None:
        """Copy blocks, reset and extend the rows of slots."""
        for source, target in plan.copies:
            self._cells[target * self._size : (target + 1) * self._size] = self._cells[
                source * self._size : (source + 1) * self._size
            ]
        for placement in plan.placements:
            self._tables[placement.slot] = []
            self._rows[placement.slot] = (placement.params, placement.output_index)
        for slot, first, blocks in plan.new_blocks:
            table = self._tables[slot]
            assert first <= len(table), "a hole in a block table"
            table[first:] = blocks

    def compute(self, plan: Plan, failed: frozenset[int]) -> StepResult:
        """Write the cells of the plan's rows, then sample."""
        assert len(set(plan.slots)) == len(plan.slots), "a slot computes twice in one step"
        assert sorted(plan.query_lens, key=lambda num: num > 1) == plan.query_lens, "rows of one token come first"
        ids, logprobs, at, written = [], {}, 0, set()
        for i, slot in enumerate(plan.slots):
            start, num = plan.starts[i], plan.query_lens[i]
            chain = self._cells[self._cell(slot, start - 1)] if start else 0
            for position in range(start, start + num):
                chain = hash((chain, plan.token_ids[at]))
                at += 1
                cell = self._cell(slot, position)
                assert cell not in written, "two rows write one cell"
                written.add(cell)
                self._cells[cell] = chain
            params, output = self._rows[slot]
            ids.append(token_after(chain, params.seed, output, start + num) if plan.samples[i] else -1)
            if plan.samples[i] and params.logprobs >= 0:
                if params.beam_width:
                    logprobs[i] = candidates_after(chain, params.logprobs)
                else:
                    logprobs[i] = TokenLogprob(logprob_after(chain, ids[-1]), 1)
        return StepResult(ids, failed, logprobs)

    def chains(self, slot: int, num: int) -> list[int]:
        """What the slot's first `num` cells hold."""
        return [self._cells[self._cell(slot, position)] for position in range(num)]

    def _cell(self, slot: int, position: int) -> int:
        table = self._tables[slot]
        assert position // self._size < len(table), "computes in a block that it does not have"
        return table[position // self._size] * self._size + position % self._size
