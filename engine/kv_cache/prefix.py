"""The prefix index: maps token prefixes, by block name, to the blocks that hold their keys and values.

A block's name is SHA-256, cut to 24 bytes, over (name of the block before it, its tokens), and 8 bytes that say whose
it is. The first block's parent is `root()`, which frames everything else the values depend on and everything that keeps
tenants apart. Equal names mean equal content, so a hit needs no token comparison. Only full blocks are named. Design:
vLLM's hash chain. See CVE-2025-46570 for why the salt is derived from the authenticated identity and never sent by a
client. The owner is in every name so that all that is a tenant's can be found, on disk too, whatever computed it.
"""

import functools
import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sluice_server.engine.kv_cache.identity import CacheIdentity, framed
from sluice_server.engine.kv_cache.log import CacheLog, NamedBlock

NAME_BYTES = 32  # of a block of the first group; those of others have one more
NUM_KEPT = 256  # roots that are kept, as each request asks for its tenant's; clients name tenants
_OWNED = 24  # bytes of a name before those of its owner
_OWNER_BYTES = NAME_BYTES - _OWNED
_NOBODY = bytes(_OWNER_BYTES)  # owns the blocks behind a root that names nobody


def root(identity: CacheIdentity, *fields: bytes) -> bytes:
    """Returns the start of the chain of names for `identity` and further fields (adapter, tenant, …)."""
    return root_of(identity.encoded(), *fields)


def root_of(identity: bytes, *fields: bytes) -> bytes:
    """Returns the same for an encoded identity."""
    return hashlib.sha256(b"sluice.prefix.v3" + framed((identity, *fields))).digest()


def owner_of(tenant: str) -> bytes:
    """Returns what the names of a tenant's blocks end with, for every identity."""
    return hashlib.sha256(b"sluice.owner.v1" + tenant.encode()).digest()[:_OWNER_BYTES]


def is_of(name: bytes, owner: bytes) -> bool:
    """Whether a block of that name, in any group of layers, is an owner's; b"": any owner's."""
    return name[_OWNED:NAME_BYTES] == owner or not owner


@functools.lru_cache(NUM_KEPT)
def tenant_root(identity: bytes, tenant: str) -> bytes:
    """Returns the start of the chain for requests of a tenant, for an encoded identity."""
    return root_of(identity, b"", tenant.encode())[:_OWNED] + owner_of(tenant)


def start_of(salt: bytes, adapter: bytes = b"", embeds: bytes = b"") -> bytes:
    """Returns the start of the chain for a request's prompt: that of its tenant, `salt`, unless more than its tokens
    decides what blocks hold.

    `adapter` and `embeds`: digests of the adapter that it is computed with and of the embeddings that it begins with,
    whose placeholders say nothing; empty without.
    """
    owner = salt[_OWNED:]
    if adapter:
        salt = root_of(salt, b"adapter", adapter)[:_OWNED] + owner
    return root_of(salt, b"prompt_embeds", embeds)[:_OWNED] + owner if embeds else salt


def names_of(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Returns the names of the full blocks of a prompt behind `parent`."""
    names = []
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = name_block(parent, tokens[end - block_size : end])
        names.append(parent)
    return names


def name_block(parent: bytes, tokens: Sequence[int], content: bytes = b"") -> bytes:
    """Returns the name of a full block: 32 bytes, with the owner of its parent. Parent and tokens have fixed sizes, so
    the concatenation is unambiguous. `content`: see `content_of`."""
    digest = hashlib.sha256(parent + array("i", tokens).tobytes() + content).digest()
    return digest[:_OWNED] + (parent[_OWNED:] or _NOBODY)


class ContentSpan(NamedTuple):
    """Tokens of a sequence whose ids say nothing of what blocks hold: `num_tokens` from `first` on. Equal digests of 32
    bytes mean equal content."""

    first: int
    num_tokens: int
    digest: bytes


def content_of(spans: Iterable[ContentSpan], start: int, end: int) -> bytes:
    """Returns which of these spans begin among the tokens from `start` to `end`, and where. Blocks behind hold the rest
    of a span: their names contain that of this one."""
    return b"".join(
        (span.first - start).to_bytes(8, "little") + span.digest for span in spans if start <= span.first < end
    )


def name_in(name: bytes, group: int) -> bytes:
    """Returns the name of a block in a group of layers, for the `name` of that block in the first group."""
    return name + bytes([group]) if group else name


class PrefixIndex:
    """Maps name ↔ block in both directions. A block has one name at most, and a name one block at most. `log`: if there
    is one, it gets every change."""

    def __init__(self) -> None:
        self.log: CacheLog | None = None
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self.num_added = 0  # names given since start

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, name: bytes) -> int | None:
        """Returns the block of that name, held or reclaimable; None if there is none."""
        return self._block_of.get(name)

    def add(self, name: bytes, block: int, logged: NamedBlock | None = None) -> None:
        """Names a full block. If another block already has the name, this one stays unnamed (its owner keeps it).
        `logged`: the block as the log has it."""
        if name not in self._block_of:
            self._block_of[name] = block
            self._name_of[block] = name
            self.num_added += 1
            if self.log is not None and logged is not None:
                self.log.add(logged)

    def forget(self, block: int) -> bytes | None:
        """Removes a block's name, before the block is overwritten, and returns it; None if it had none."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
            if self.log is not None:
                self.log.remove(name)
        return name

    def move(self, block: int, target: int) -> None:
        """Gives a block's name, if it has one, to the block that its contents move to."""
        name = self._name_of.pop(block, None)
        if name is not None:
            self._block_of[name], self._name_of[target] = target, name

    def named(self, owner: bytes) -> list[int]:
        """Returns the blocks with a name of this owner; for b"" all that have a name."""
        return [block for block, name in self._name_of.items() if is_of(name, owner)]

    def name_of(self, block: int) -> bytes | None:
        """Returns the name of a block; None if it has none."""
        return self._name_of.get(block)

    def has(self, block: int) -> bool:
        """Whether the block has a name."""
        return block in self._name_of

    def check(self) -> None:
        """Asserts that both directions agree."""
        assert len(self._block_of) == len(self._name_of)
        for name, block in self._block_of.items():
            assert self._name_of[block] == name
        if self.log is not None:
            assert self.log.names == {name for name in self._block_of if len(name) == NAME_BYTES}
