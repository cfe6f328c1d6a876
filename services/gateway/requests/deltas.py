"""Chooses which waiting messages are sent together as one delta. Pure."""

from collections.abc import Sequence

from sluice_server.services.gateway.requests.history import num_bytes
from sluice_server.services.messages.messages import Text

# As counted by `num_bytes`. A character may take four bytes and a token has candidates; a client with default options
# receives messages of 4 MiB at most.
MAX_DELTA_BYTES = 256 << 10


def taken_of(waiting: list[Text], max_bytes: int | None = None) -> tuple[list[Text], list[Text]]:
    """Splits `waiting` into messages for one delta and the rest. The delta gets messages of the first one's output, at
    least one, up to `max_bytes`."""
    index, size = waiting[0].output_index, 0
    taken: list[Text] = []
    for one in waiting:
        if one.output_index != index:
            continue
        size += num_bytes(one)
        if taken and max_bytes is not None and size > max_bytes:
            break
        taken.append(one)
    chosen = set(map(id, taken))
    return taken, [one for one in waiting if id(one) not in chosen]


def has_content(texts: Sequence[Text]) -> bool:
    """Whether the messages hold tokens, text, reasoning or tool calls for a delta."""
    for one in texts:  # noqa: SIM110 # a generator would cost more: nearly always the first message decides
        if one.tokens or one.text or one.reasoning or one.tool_calls or one.tool_call_parts:
            return True
    return False
