"""Reports neighbours whose messages have another schema version. Pure: time is an argument.

Each neighbour is reported again while its frames arrive, as the stages behind may be new; at most once per `AGAIN_S`.
The log gets one line per boot of a neighbour.
"""

from collections.abc import Iterable, Iterator

from sluice_server.services.messages.processes import Mismatch
from sluice_server.services.ring.frames import Header

AGAIN_S = 1.0
FRESH_S = 10.0  # after this time without a frame the neighbour may have been replaced
MAX_KNOWN = 64


class SchemaMismatches:
    """The neighbours with another schema version that one process has heard."""

    def __init__(self, reader: str, schema: int) -> None:
        self._reader = reader
        self._schema = schema
        self._known: dict[str, tuple[Header, float]] = {}  # and the time of its last report

    def record(self, headers: Iterable[Header], now_s: float) -> Iterator[tuple[Mismatch, bool]]:
        """Yields the mismatches to report now, each with whether it is new, and so is to be logged."""
        for header in headers:
            known, told_s = self._known.get(header.sender, (None, float("-inf")))
            is_new = known is None or (known.epoch, known.schema) != (header.epoch, header.schema)
            if is_new and known is None and len(self._known) >= MAX_KNOWN:
                continue  # possibly forged names; their frames are counted only
            if is_new or now_s - told_s >= AGAIN_S:
                self._known[header.sender] = header, now_s
                yield Mismatch(self._reader, self._schema, header.sender, header.schema), is_new

    def summary(self, now_s: float) -> str:
        """Returns one line about the neighbours heard lately; "" if there are none."""
        fresh = [header for header, told_s in self._known.values() if now_s - told_s <= FRESH_S]
        named = ", ".join(f"{header.sender} (version {header.schema})" for header in fresh)
        return f"refuses frames of {named}; it reads version {self._schema}" if named else ""
