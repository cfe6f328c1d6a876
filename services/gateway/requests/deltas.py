"""Which of the messages that wait for a reader leave together as one delta. Pure."""

from collections.abc import Sequence

from sluice_server.services.gateway.requests.history import num_bytes
from sluice_server.services.messages.messages import Text

# Of what `num_bytes` counts: characters may take four bytes and tokens have candidates, and a client that was told
# nothing else receives messages of 4 MiB at most.
MAX_DELTA_BYTES = 256 << 10


def taken_of(waiting: list[Text], max_bytes: int | None = None) -> tuple[list[Text], list[Text]]:
    """Messages of the first one's output, up to so many bytes but at least one; and the rest."""
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
    """Whether there is anything in them for a delta."""
    for one in texts:  # noqa: SIM110 # a generator costs more than all of it, as nearly always the first decides
        if one.tokens or one.text or one.reasoning or one.tool_calls:
            return True
    return False
