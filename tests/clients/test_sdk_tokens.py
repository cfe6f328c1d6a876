"""Tokens of a prompt with both Python clients against a real gateway, whose ring the test plays."""

import asyncio

import sluice
from sluice.tokens import tokenize_request
from sluice.v1 import types_pb2

from sluice_server.services.messages.details import Tokenized
from sluice_server.services.messages.messages import Result, Submit
from sluice_server.services.messages.work import Tokenize, pack_ids
from tests.services.gateway.fake_ring import Rig, running

SPANS = [sluice.TokenSpan(5, 0, 1), sluice.TokenSpan(6, 1, 2)]


def answering(rig: Rig) -> None:
    """Has the ring answer as the tokenizer would."""

    def answer(submit: Submit) -> None:
        work = submit.work
        assert isinstance(work, Tokenize)
        starts, ends = (pack_ids([0, 1]), pack_ids([1, 2])) if work.offsets else (b"", b"")
        whole = Tokenized(pack_ids([5, 6]), {5: b"a", 6: b"b"}, starts=starts, ends=ends)
        rig.lane.handle(Result(submit.envelope, Tokenized(b"", {}, num_tokens=2) if work.count_only else whole))

    rig.ring.script = answer


async def test_both_clients_count_tokens_and_tell_their_places() -> None:
    async with running() as rig:
        answering(rig)
        async with sluice.AsyncClient(f"127.0.0.1:{rig.port}") as client:
            assert await client.tokenize("ab") == [5, 6]
            assert await client.count_tokens("ab") == 2
            assert await client.token_spans("ab") == SPANS

        def blocking() -> tuple[list[int], int, list[sluice.TokenSpan]]:
            with sluice.Client(f"127.0.0.1:{rig.port}") as client:
                return client.tokenize("ab"), client.count_tokens("ab"), client.token_spans("ab")

        assert await asyncio.to_thread(blocking) == ([5, 6], 2, SPANS)


def test_a_chat_is_counted_as_one() -> None:
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role=types_pb2.ROLE_USER)])
    assert tokenize_request(chat, count_only=True).chat == chat
