"""Defines the messages of the ring that processes send about themselves: health checks, load, cache contents, schemas.

Probe, Report, CacheChanges and Mismatch go to all processes, CacheQuery to all engines. As in
`services.messages.messages`, every change in this file requires another SCHEMA_VERSION.
"""

import enum

import msgspec

from sluice_server.engine.executor.computing import UNKNOWN, Computing
from sluice_server.services.messages.details import AdapterState, CachedBlock, Load


class Role(enum.StrEnum):
    """The stages, in ring order."""

    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    ENGINE = "engine"
    DETOKENIZER = "detokenizer"


class EngineRole(enum.StrEnum):
    """What an engine gets from a router: any request; prompts, whose tokens others go on with; tokens behind short
    prompts, and what others hand off."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Visit(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """One process that a Probe has passed."""

    role: Role
    id: str
    epoch: int
    progress: int  # engine: layers computed since start; other stages: messages handled
    lost: int = 0  # frames sent to it that did not arrive
    revision: str = ""  # that the engine serves; at other stages the configuration's (see `revisions`)
    identity: str = ""  # of an engine's cache, shortened: engines that differ in it may compute different tokens


class Probe(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """A health check: sent by a gateway, visits one process of each role in `route` and returns to its origin."""

    origin: str
    nonce: int
    route: tuple[str, ...]  # ids of the tokenizer, engine and detokenizer to visit
    visits: tuple[Visit, ...] = ()
    epoch: int = 0  # boot epoch of the origin
    is_mixed: bool = False  # revisions differ: a process whose files have changed must restart
    num_generating: int = 0  # the origin's requests, of all its models, that have had a token and not their end


class Report(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Engine → every gateway, round the ring, and on to tokenizers that choose engines: the engine's state."""

    engine_id: str
    epoch: int
    load: Load
    served_token: bool  # at least one token was generated since start
    computing: Computing = UNKNOWN
    cache_identity: bytes = b""  # of which the names of its blocks are made, encoded; b"" if it does not report them
    memory_level: int = 0  # how short memory is at the engine; see `services.memory.level`
    adapters: tuple[AdapterState, ...] | None = None  # those that have names; None: as reported before
    num_adapter_changes: int = 0  # to these names
    role: EngineRole = EngineRole.BOTH
    fetch_s: float = 0.0  # seconds that a token takes whose block is fetched from another engine; 0 while unknown


class CacheChanges(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """Engine → every gateway, round the ring, and on to tokenizers that choose engines: what its prefix cache holds.
    Removals come before additions."""

    engine_id: str
    epoch: int
    number: int  # of the message since the engine started: a gap means loss
    is_whole: bool = False  # nothing that was reported before holds
    removed: tuple[bytes, ...] = ()  # names
    added: tuple[CachedBlock, ...] = ()


class CacheQuery(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Gateway or tokenizer → every engine: say all that the prefix cache holds."""

    origin: str


class Mismatch(msgspec.Struct, frozen=True, gc=False, tag=True, forbid_unknown_fields=True):
    """Any process → every gateway: `reader` rejects frames of `sender`, because their schema versions differ. Repeated
    while such frames arrive."""

    reader: str
    reader_schema: int
    sender: str
    sender_schema: int
