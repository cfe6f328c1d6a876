"""Sends each prompt to the engine that is expected to bring its first token soonest, as its tokens are known here.

The gateway says which engines serve. It learns the engine from the request's first answer; until then the client's
changes and its Cancel come with the gateway's own choice, and are passed on to the engine that has the prompt.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from sluice_server.engine.kv_cache.prefix import names_of, start_of, tenant_root
from sluice_server.services.messages.details import Routed
from sluice_server.services.messages.messages import Append, Cancel, CloseInput, Grant, Message, Prompt, Submit, Update
from sluice_server.services.messages.processes import CacheChanges, CacheQuery, Report
from sluice_server.services.messages.work import unpack_ids
from sluice_server.services.routing.router import UNKNOWN, Choice, EngineState, Router

TOKENS_PER_S = 10_000.0  # assumed of an engine that has not computed yet
ASK_AGAIN_S = 1.0
MAX_REMEMBERED = 16_384  # requests whose engine was chosen here
FETCH_SHARE = UNKNOWN.fetch_share  # until an engine has fetched
M = TypeVar("M", bound=Message)


class PromptRouter:
    """The router of a tokenizer, and where the prompts of late went."""

    def __init__(
        self,
        process_id: str,
        engines: Sequence[str],
        block_size: int,
        emit: Callable[[Message], None],
        clock: Callable[[], float],
    ) -> None:
        """`engines`: ids of all engines, of which each request's message says which serve."""
        self._router = Router(engines, block_size, TOKENS_PER_S)
        self._process_id = process_id
        self._engines = frozenset(engines)
        self._block_size = block_size
        self._emit = emit
        self._clock = clock
        self._identities: dict[str, bytes] = {}  # by engine: engines of two revisions name the same tokens differently
        self._epochs: dict[str, int] = {}
        self._went: OrderedDict[str, tuple[int, str]] = OrderedDict()  # by request: attempt and engine
        self._asked_s = clock() - ASK_AGAIN_S

    def change(self, engines: Sequence[str]) -> None:
        """Makes these the engines of the ring: some have joined, and some have left."""
        for name in self._engines.difference(engines):
            self._epochs.pop(name, None)
            self._identities.pop(name, None)
        self._engines = frozenset(engines)
        self._router.change(engines)

    def report(self, report: Report) -> None:
        """Takes an engine's report, which comes once from every gateway."""
        name = report.engine_id
        if name not in self._engines or report.epoch < self._epochs.get(name, 0):
            return  # the latter is of a process that has ended
        if report.epoch > self._epochs.get(name, report.epoch):
            self._router.lost(name)
        self._epochs[name] = report.epoch
        self._identities[name] = report.cache_identity
        share = report.fetch_s / report.load.token_s if report.fetch_s and report.load.token_s else FETCH_SHARE
        self._router.states[name] = EngineState(report.role, report.load.num_running, share)
        if report.load.token_s > 0:
            self._router.queues[name].measured(1.0 / report.load.token_s, self._clock())
        if not self._router.index.knows(name):
            self._ask()

    def cached(self, changes: CacheChanges) -> None:
        """Takes what an engine's cache holds, which comes once from every gateway."""
        added = [block.name for block in changes.added]
        where = changes.engine_id, changes.epoch, changes.number
        if not self._router.index.report(*where, changes.removed, added, is_whole=changes.is_whole):
            self._ask()

    def route(self, submit: Submit, prompt: Prompt) -> tuple[Prompt, Choice | None]:
        """Returns the prompt with its engine, and why it is that one; unchanged if the gateway leaves no choice."""
        able = [name for name in submit.able if name in self._engines]
        if submit.beside:
            able = [name for name in able if name != self._went.get(submit.beside, (0, ""))[1]]
        if not able or (len(able) < 2 and not submit.beside):
            return prompt, None
        envelope, tokens = prompt.envelope, unpack_ids(prompt.ids)
        names, is_handed_off = self._names(prompt, tokens, able), envelope.attempt > 0
        choice = self._router.choose(names, len(tokens), self._clock(), is_handed_off=is_handed_off)
        prompt = msgspec.structs.replace(
            prompt, routed=Routed(choice.reason, choice.num_cached, round(choice.num_waiting))
        )
        self._went[envelope.request_id] = envelope.attempt, choice.engine
        while len(self._went) > MAX_REMEMBERED:
            self._went.popitem(last=False)
        if choice.engine == envelope.engine:
            return prompt, choice
        return msgspec.structs.replace(prompt, envelope=msgspec.structs.replace(envelope, engine=choice.engine)), choice

    def follow(self, message: M) -> M:
        """Returns a message that came behind a prompt, for the engine that has the prompt."""
        if not isinstance(message, Cancel | Grant | Append | Update | CloseInput):
            return message
        envelope = message.envelope
        attempt, engine = self._went.get(envelope.request_id, (-1, ""))
        if attempt != envelope.attempt:
            return message
        if isinstance(message, Cancel) and message.output_index is None:
            del self._went[envelope.request_id]
        return msgspec.structs.replace(message, envelope=msgspec.structs.replace(envelope, engine=engine))

    def _names(self, prompt: Prompt, tokens: Sequence[int], able: Sequence[str]) -> dict[str, Sequence[bytes]]:
        """Returns how each engine names the prompt's full blocks; engines of one identity share one list."""
        own = {engine: self._identities.get(engine, b"") for engine in able}
        named: dict[bytes, Sequence[bytes]] = {b"": ()}
        for identity in own.values():
            if identity not in named:
                named[identity] = () if prompt.scheduling.bypasses_cache else self._named(prompt, tokens, identity)
        return {engine: named[identity] for engine, identity in own.items()}

    def _named(self, prompt: Prompt, tokens: Sequence[int], identity: bytes) -> list[bytes]:
        adapter, embeds = prompt.adapter, prompt.embeds
        digests = b"" if adapter is None else adapter.digest, b"" if embeds is None else embeds.digest
        start = start_of(tenant_root(identity, prompt.envelope.tenant), *digests)
        return names_of(start, tokens, self._block_size)

    def _ask(self) -> None:
        now_s = self._clock()
        if now_s - self._asked_s >= ASK_AGAIN_S:
            self._asked_s = now_s
            self._emit(CacheQuery(self._process_id))
