"""The socket on which the supervisor takes commands: what it answers, and what it does not."""

import asyncio
import socket
from pathlib import Path

import pytest

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.process.asking import ask
from sluice_server.services.process.model_commands import SOCKET, Answer, Command, NameModels, UnloadLane
from sluice_server.services.supervisor.command_socket import CommandSocket


async def asked(directory: Path, command: Command, answer: Answer, commands: CommandSocket) -> str:
    taken: list[Command] = []

    def carry_out(one: Command) -> Answer:
        taken.append(one)
        return answer

    calling = asyncio.create_task(ask(directory, command))
    await asyncio.to_thread(commands.take, carry_out)
    try:
        return await calling
    finally:
        assert taken == [command]


async def test_a_command_gets_its_answer_or_its_error(tmp_path: Path) -> None:
    commands = CommandSocket(tmp_path)
    assert await asked(tmp_path, NameModels("x", {"a": 1}), Answer("m7"), commands) == "m7"
    refused = Answer("", int(Code.NOT_FOUND), "MODEL_NOT_FOUND", "no", "model")
    with pytest.raises(ServiceError, match="no") as error:
        await asked(tmp_path, UnloadLane("a", 1.0), refused, commands)
    assert (error.value.code, error.value.reason, error.value.field) == (Code.NOT_FOUND, "MODEL_NOT_FOUND", "model")
    commands.close()
    with pytest.raises(ServiceError, match="supervisor") as gone:
        await ask(tmp_path, UnloadLane("a", 1.0))
    assert gone.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("line", [b"", b"\n", b"{}\n", b"\xff\n", b'{"type":"LoadLane"}\n', b'{"type":"Sleep"}\n'])
def test_what_is_no_command_gets_no_answer_and_does_no_harm(tmp_path: Path, line: bytes) -> None:
    commands = CommandSocket(tmp_path)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(tmp_path / SOCKET))
        caller.sendall(line)
        caller.shutdown(socket.SHUT_WR)
        commands.take(lambda command: Answer("never"))
        assert caller.recv(100) == b""
    commands.reopen()
    assert (tmp_path / SOCKET).is_socket()
    commands.close()
