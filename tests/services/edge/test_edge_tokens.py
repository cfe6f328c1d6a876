"""Tokens over HTTP, with vLLM's bodies."""

from typing import Any

import httpx2
import pytest

from sluice_server.services.messages.details import Detokenized, Tokenized
from sluice_server.services.messages.messages import Result
from sluice_server.services.messages.work import ChatPrompt, Detokenize, TextPrompt, Tokenize, Work, pack_ids
from tests.services.edge.edge_rig import EdgeRig, edge
from tests.services.gateway.fake_ring import settings

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PIECES = {5: b"a", 6: b"\xc3"}


def answering(rig: EdgeRig) -> list[Work]:
    """Has the ring answer, and lists what it was asked."""
    asked: list[Work] = []

    def script(submit: object) -> None:
        ask = rig.ring.submits[-1]
        asked.append(ask.work)
        value = Tokenized(pack_ids([5, 6]), PIECES) if isinstance(ask.work, Tokenize) else Detokenized("aé")
        rig.lane.handle(Result(ask.envelope, value))

    rig.ring.script = script
    return asked


async def post(rig: EdgeRig, path: str, body: dict[str, Any]) -> httpx2.Response:
    async with httpx2.AsyncClient(timeout=60) as client:
        return await client.post(rig.url + path, json=body)


async def test_tokens_of_a_prompt() -> None:
    async with edge() as rig:
        asked = answering(rig)
        found = (await post(rig, "/tokenize", {"model": "toy", "prompt": "aé", "add_special_tokens": False})).json()
        assert found == {"count": 2, "max_model_len": 1000, "tokens": [5, 6], "token_strs": None}
        found = (await post(rig, "/tokenize", {"prompt": "aé", "return_token_strs": True})).json()
        assert found["token_strs"] == ["a", "\ufffd"]
        first, second = asked
        assert isinstance(first, Tokenize) and isinstance(second, Tokenize)
        assert isinstance(first.prompt, TextPrompt) and first.prompt.text == "aé"
        assert isinstance(second.prompt, TextPrompt)
        assert (first.prompt.add_special_tokens, second.prompt.add_special_tokens) == (False, True)


async def test_tokens_are_counted_alone_or_told_with_their_places() -> None:
    async with edge() as rig:
        values = [
            Tokenized(b"", {}, num_tokens=3),
            Tokenized(pack_ids([5, 6]), PIECES, starts=pack_ids([0, 1]), ends=pack_ids([1, 2]), text="[aé]"),
        ]
        rig.ring.script = lambda submit: rig.lane.handle(Result(submit.envelope, values.pop(0)))
        found = (await post(rig, "/tokenize", {"prompt": "aé", "count_only": True})).json()
        assert found == {"count": 3, "max_model_len": 1000, "tokens": [], "token_strs": None}
        found = (await post(rig, "/tokenize", {"messages": HELLO, "return_offsets": True})).json()
        assert (found["offsets"], found["prompt"]) == ([[0, 1], [1, 2]], "[aé]")
        for name in ("return_offsets", "return_token_strs"):
            refused = await post(rig, "/tokenize", {"prompt": "a", "count_only": True, name: True})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name


async def test_tokens_of_messages() -> None:
    async with edge() as rig:
        asked = answering(rig)
        body = {"messages": HELLO, "add_generation_prompt": False, "chat_template_kwargs": {"x": 1}}
        assert (await post(rig, "/tokenize", body)).json()["count"] == 2
        (work,) = asked
        assert isinstance(work, Tokenize) and isinstance(work.prompt, ChatPrompt)
        prompt = work.prompt
        assert [one.content for one in prompt.messages] == ["hello"] and prompt.variables == '{"x":1}'
        assert prompt.add_generation_prompt is False and prompt.add_special_tokens is False


async def test_tokens_of_messages_with_all_that_a_template_is_given() -> None:
    async with edge(settings(trust_request_chat_template=True)) as rig:
        asked = answering(rig)
        messages = [*HELLO, {"role": "assistant", "content": "It is"}]
        body = {
            "messages": messages,
            "continue_final_message": True,
            "documents": [{"title": "a", "text": ["b"]}],
            "chat_template": "{{ messages }}",
            "add_special_tokens": True,
        }
        assert (await post(rig, "/tokenize", body)).status_code == 200
        (work,) = asked
        assert isinstance(work, Tokenize) and isinstance(work.prompt, ChatPrompt)
        prompt = work.prompt
        assert prompt.continue_final_message and not prompt.add_generation_prompt and prompt.add_special_tokens
        assert prompt.documents == ('{"title":"a","text":["b"]}',) and prompt.template == "{{ messages }}"


async def test_the_text_of_tokens() -> None:
    async with edge() as rig:
        asked = answering(rig)
        assert (await post(rig, "/detokenize", {"model": "toy", "tokens": [5, 6]})).json() == {"prompt": "aé"}
        (work,) = asked
        assert isinstance(work, Detokenize) and work.skip_special_tokens is False


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "x", "documents": [{}]}, "documents"),
        ("/tokenize", {"prompt": "x", "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "x", "made_up": 1}, "made_up"),
        ("/detokenize", {}, None),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, None),
    ],
)
async def test_what_is_not_right_is_named(path: str, body: dict[str, Any], param: str | None) -> None:
    async with edge() as rig:
        found = await post(rig, path, body)
        assert found.status_code == (404 if "model" in body else 400)
        assert found.json()["error"]["param"] == param
