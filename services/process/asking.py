"""Asks the supervisor about models, for gateways: apart from the commands, as a supervisor does without asyncio."""

import asyncio
from pathlib import Path

import msgspec

from sluice_server.engine.errors import Code, ServiceError, stage_lost
from sluice_server.services.process.model_commands import MAX_LINE_BYTES, SOCKET, Answer, Command

ANSWER_S = 10.0


async def ask(directory: Path, command: Command) -> str:
    """Has the supervisor carry out a command; returns the lane. Raises ServiceError."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(directory / SOCKET, limit=MAX_LINE_BYTES)
            try:
                writer.write(msgspec.json.encode(command) + b"\n")
                answer = msgspec.json.decode(await reader.readline(), type=Answer)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise stage_lost("supervisor") from error
    if answer.code:
        raise ServiceError(Code(answer.code), answer.reason, answer.message, field=answer.field)
    return answer.lane
