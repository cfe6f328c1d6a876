"""Applies a client's change of a running request to the engine. Keeps no state of its own."""

from typing import assert_never

from sluice_server.engine.engine import Engine
from sluice_server.services.messages.messages import Append, Change, CloseInput, Grant, Update
from sluice_server.services.messages.work import TokenPrompt, unpack_ids


def carry_out(engine: Engine, message: Change, now: float) -> None:
    """Applies one change; `now` is the engine's clock. Raises ServiceError when the engine rejects it."""
    request_id = message.envelope.request_id
    match message:
        case Grant():
            engine.grant(request_id, message.tokens)
        case Append():
            assert isinstance(message.piece, TokenPrompt), "the tokenizer makes ids of text"
            engine.append(request_id, unpack_ids(message.piece.ids))
        case Update():
            left_s = message.time_left_s
            deadline_s = None if left_s is None else now + left_s
            engine.update(request_id, message.max_tokens, message.priority, deadline_s)
        case CloseInput():
            engine.close_input(request_id)
        case _:
            assert_never(message)
