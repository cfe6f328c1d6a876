"""Computes where a step samples: behind the last token of a row, or, with k drafts, behind its last 1 + k tokens.

Takes a plan and gives flat lists with one entry per token to be sampled. Pure: no tensors, no sampling parameters.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.plan import StepPlan, StepResult, TokenLogprob, VerifiedDrafts, num_accepted
from sluice_server.engine.sampling.sampler import SampledRows
from sluice_server.engine.speculation.trees import paths_of, walk


@dataclasses.dataclass(frozen=True, slots=True)
class SamplePositions:
    """Where a step samples, as flat lists.

    Attributes:
        rows: the rows of the plan that sample.
        drafts: by row, the drafted tokens, if it has any.
        tokens: per sampled token, index of the step's token that it follows; empty when no row has drafts.
        slots, positions: per sampled token, its slot and its position in the sequence.
        ahead: by sampled token behind drafts, these drafts.
        parents: by row whose drafts are a tree, their parents.
    """

    rows: list[int]
    drafts: dict[int, list[int]]
    tokens: list[int]
    slots: list[int]
    positions: list[int]
    ahead: dict[int, list[int]]
    parents: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, plan: StepPlan) -> "SamplePositions":
        """Returns the sample positions of a step's rows, in their order."""
        rows = [i for i, samples in enumerate(plan.samples) if samples]
        if not plan.drafts:
            # The sampled token's position: one behind the last computed.
            positions = [plan.starts[i] + plan.query_lens[i] for i in rows]
            return cls(rows, {}, [], [plan.slots[i] for i in rows], positions, {}, {})
        sample_positions = cls(rows, {}, [], [], [], {}, plan.parents)
        for i, end in enumerate(itertools.accumulate(plan.query_lens)):
            if plan.samples[i]:
                sample_positions._add(plan, i, end)
        return sample_positions

    def collect(self, sampled: SampledRows, num_rows: int) -> StepResult:
        """Returns the step's result, given what was sampled at the sample positions."""
        if self.drafts:
            return self._collect_runs(sampled, num_rows)
        rows = self.rows
        if len(rows) == num_rows:
            return StepResult(sampled.ids, frozenset(sampled.bad), sampled.logprobs, errors=sampled.errors)
        ids = [-1] * num_rows
        for i, token in zip(rows, sampled.ids, strict=True):
            ids[i] = token
        logprobs = {rows[i]: logprob for i, logprob in sampled.logprobs.items()}
        errors = {rows[i]: error for i, error in sampled.errors.items()}
        return StepResult(ids, frozenset(rows[i] for i in sampled.bad), logprobs, errors=errors)

    def kept(self, sampled: SampledRows) -> list[tuple[int, int, list[int]]]:
        """Returns (slot, position of the next token, accepted drafts) of the rows with accepted drafts."""
        kept = []
        for i, draft, at in self._each():
            path = self._standing(i, draft, at, sampled)
            if path:
                kept.append((self.slots[at], self.positions[at] + len(path), [draft[j] for j in path]))
        return kept

    def ends(self, sampled: SampledRows) -> list[tuple[int, int, int]]:
        """Returns (slot, position, token) of the last token that each row samples and keeps."""
        ends = []
        for i, draft, at in self._each():
            path = self._standing(i, draft, at, sampled)
            last = at + 1 + path[-1] if path else at
            if last not in sampled.bad:
                ends.append((self.slots[at], self.positions[at] + len(path), sampled.ids[last]))
        return ends

    def moves(self, sampled: SampledRows) -> list[tuple[int, int, int]]:
        """Returns (slot, position, new position) of accepted drafts that lie behind rejected ones."""
        moves = []
        for i, draft, at in self._each():
            if i in self.parents:
                slot, first = self.slots[at], self.positions[at]
                path = self._standing(i, draft, at, sampled)
                moves += [(slot, first + j, first + to) for to, j in enumerate(path) if j != to]
        return moves

    def _collect_runs(self, sampled: SampledRows, num_rows: int) -> StepResult:
        ids, failed = [-1] * num_rows, set[int]()
        runs: dict[int, VerifiedDrafts] = {}
        logprobs: dict[int, TokenLogprob] = {}
        errors: dict[int, ServiceError] = {}
        for i, draft, at in self._each():
            path = self._standing(i, draft, at, sampled)
            standing = [at, *(at + 1 + j for j in path)]
            sample_positions = standing if i in self.parents else range(at, at + 1 + len(draft))
            run = [sampled.ids[j] for j in sample_positions]
            ids[i] = run[0]
            # What is behind a wrong draft is ignored, even logits without usable numbers.
            broken = sorted(set(sampled.bad).intersection(standing))
            if broken:
                failed.add(i)
                errors |= {i: sampled.errors[broken[0]]} if broken[0] in sampled.errors else {}
            found = tuple(sampled.logprobs[j] for j in sample_positions if j in sampled.logprobs)
            if draft:
                runs[i] = VerifiedDrafts(tuple(run), found)
            elif found:
                logprobs[i] = found[0]
        return StepResult(ids, frozenset(failed), logprobs, runs, errors)

    def _standing(self, i: int, draft: list[int], at: int, sampled: SampledRows) -> Sequence[int]:
        """Returns the accepted drafts of row `i`, as indices; `at` is its first sample position."""
        run = sampled.ids[at : at + 1 + len(draft)]
        parents = self.parents.get(i)
        return range(num_accepted(draft, run)) if parents is None else walk(draft, parents, run)

    def _each(self) -> list[tuple[int, list[int], int]]:
        """Returns (row, its drafts, its first sample position) of the rows that sample."""
        each, at = [], 0
        for i in self.rows:
            draft = self.drafts.get(i, [])
            each.append((i, draft, at))
            at += 1 + len(draft)
        return each

    def _add(self, plan: StepPlan, i: int, end: int) -> None:
        draft = plan.drafted(i, end)
        num = len(draft)
        if num:
            self.drafts[i] = draft
        parents = plan.parents.get(i)
        behind = [draft[: j + 1] for j in range(num)] if parents is None else paths_of(draft, parents)
        for j, path in enumerate(([], *behind)):
            if path:
                self.ahead[len(self.slots)] = path
            self.slots.append(plan.slots[i])
            self.positions.append(plan.starts[i] + plan.query_lens[i] - num + len(path))
            self.tokens.append(end - 1 - num + j)
