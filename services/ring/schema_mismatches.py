"""Neighbours whose messages are of another schema version, as they are heard. Pure; time comes in.

Each is told of again while its frames come, as what is behind may be new and know nothing of it; but seldom, and the
log gets one line for each of its boots.
"""

from collections.abc import Iterable, Iterator

from sluice_server.services.messages.messages import Mismatch
from sluice_server.services.ring.frames import Header

AGAIN_S = 1.0
FRESH_S = 10.0  # heard so long ago it may have been replaced
MAX_KNOWN = 64


class SchemaMismatches:
    """As one process hears them."""

    def __init__(self, reader: str, schema: int) -> None:
        self._reader = reader
        self._schema = schema
        self._known: dict[str, tuple[Header, float]] = {}  # and when it was told of

    def heard(self, headers: Iterable[Header], now_s: float) -> Iterator[tuple[Mismatch, bool]]:
        """Those to tell of now, and whether the log does not know them yet."""
        for header in headers:
            known, told_s = self._known.get(header.sender, (None, float("-inf")))
            is_new = known is None or (known.epoch, known.schema) != (header.epoch, header.schema)
            if is_new and known is None and len(self._known) >= MAX_KNOWN:
                continue  # names that are made up: they are counted
            if is_new or now_s - told_s >= AGAIN_S:
                self._known[header.sender] = header, now_s
                yield Mismatch(self._reader, self._schema, header.sender, header.schema), is_new

    def told(self, now_s: float) -> str:
        """Of those heard lately, in one line; "" if there are none."""
        fresh = [header for header, told_s in self._known.values() if now_s - told_s <= FRESH_S]
        named = ", ".join(f"{header.sender} (version {header.schema})" for header in fresh)
        return f"refuses frames of {named}; it reads version {self._schema}" if named else ""
