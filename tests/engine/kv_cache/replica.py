"""A reader of a cache's log: the blocks that its differences add up to."""

from sluice_server.engine.kv_cache.log import CacheDiff, NamedBlock
from sluice_server.engine.kv_cache.prefix import name_block


class Replica:
    """The blocks of an index, as its log tells them."""

    def __init__(self) -> None:
        self.live: dict[bytes, NamedBlock] = {}

    @property
    def names(self) -> frozenset[bytes]:
        return frozenset(self.live)

    def follow(self, diff: CacheDiff | None) -> None:
        """Applies a difference; each must say only what is new, and parents of a whole one come first."""
        if diff is None:
            return
        if diff.is_whole:
            self.live.clear()
        for name in diff.removed:
            del self.live[name]
        all_names = {block.name for block in diff.added}
        for block in diff.added:
            assert block.name not in self.live, "told twice"
            assert block.name == name_block(block.parent, block.tokens)
            if diff.is_whole:
                assert block.parent in self.live or block.parent not in all_names, "before its parent"
            self.live[block.name] = block
