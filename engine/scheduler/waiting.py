"""The waiting queue: sequences without a slot, in the order of the policy, with bounds on what new requests may add.

Independent of blocks and steps. A preempted sequence returns to the place given by its key, and is never refused.
"""

import bisect
from collections.abc import Iterator

from sluice_server.engine.errors import Code, ServiceError, queue_full
from sluice_server.engine.scheduler.group import SequenceGroup
from sluice_server.engine.scheduler.policies import Policy
from sluice_server.engine.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences that wait to be admitted."""

    def __init__(self, policy: Policy, max_requests: int, max_tokens: int) -> None:
        self.num_tokens = 0  # tokens of the waiting prompts
        self.num_with_adapter = 0  # sequences that need an adapter
        self._policy = policy
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def check_room(self, group: SequenceGroup) -> None:
        """Raises ServiceError RESOURCE_EXHAUSTED if the queue is full for a new request."""
        if len(self._sequences) >= self._max_requests:
            raise queue_full(len(self._sequences), self._max_requests)
        if self._sequences and self.num_tokens + len(group.prompt) > self._max_tokens:
            raise _tokens_full(self.num_tokens, len(group.prompt), self._max_tokens)

    def add(self, sequence: Sequence) -> None:
        """Inserts a sequence at its place in the order."""
        self.num_tokens += len(sequence.group.prompt)
        self.num_with_adapter += sequence.group.request.adapter is not None
        bisect.insort(self._sequences, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence."""
        self.num_tokens -= len(sequence.group.prompt)
        self.num_with_adapter -= sequence.group.request.adapter is not None
        self._sequences.remove(sequence)

    def in_order(self) -> list[Sequence]:
        """Returns the sequences in the present order; a policy that is not static is evaluated again."""
        if not self._policy.is_static:
            for sequence in self._sequences:
                sequence.group.measure = self._policy.measure(sequence.group)
            self._sequences.sort(key=_key)
        return list(self._sequences)

    def check(self) -> None:
        """Asserts that the token count is right and, for a static policy, the order."""
        assert self.num_tokens == sum(len(sequence.group.prompt) for sequence in self._sequences)
        assert self.num_with_adapter == sum(one.group.request.adapter is not None for one in self._sequences)
        if self._policy.is_static:
            keys = [sequence.key for sequence in self._sequences]
            assert keys == sorted(keys), "the queue is out of order"


def _key(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.key


def _tokens_full(queued: int, more: int, limit: int) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"prompts of {queued} tokens are queued, {more} more would pass this server's {limit}: try again later",
        details={"actual": str(queued + more), "limit": str(limit)},
        retry_after_s=1.0,
    )
