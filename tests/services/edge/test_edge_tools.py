"""Tools, calls and reasoning through the edge, with OpenAI's own client."""

import json
from typing import Any

import openai
import pytest

from sluice_server.engine.request import FinishReason
from sluice_server.services.messages.details import Admitted, TokenRecord
from sluice_server.services.messages.messages import Submit, Text
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Generate, Stops, Tool, ToolCall, ToolCallPart
from tests.services.edge.edge_rig import EdgeRig, edge

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}]
ASK: list[Any] = [{"role": "user", "content": "weather?"}]
CALLS = (ToolCall("weather", '{"city":"é"}', "id1"), ToolCall("weather", "{}", "id2"))

PARTS = (
    ToolCallPart(0, "", "id1", "weather"),
    ToolCallPart(0, '{"city":'),
    ToolCallPart(0, '"é"}'),
    ToolCallPart(1, "{}", "id2", "weather"),
)


def calling(rig: EdgeRig) -> None:
    """An output that reasons, writes text, calls twice, and ends."""

    def play(submit: Submit) -> None:
        envelope, record = submit.envelope, (TokenRecord(1, b"x"),)
        rig.ring.play(
            Text(envelope, 0, record, "", admitted=Admitted(3, 0, 8, Stops()), reasoning="hm", num_reasoning=1),
            Text(envelope, 1, record, "so", tool_calls=CALLS[:1], tool_call_parts=PARTS[:3]),
            Text(envelope, 2, record, "", tool_calls=CALLS[1:], tool_call_parts=PARTS[3:]),
            Text(envelope, 3, (), "", finish=FinishReason.EOS),
        )

    rig.ring.script = play


def prompt(rig: EdgeRig) -> ChatPrompt:
    work = rig.ring.submits[-1].work
    assert isinstance(work, Generate) and isinstance(work.prompt, ChatPrompt)
    return work.prompt


async def test_a_chat_with_tools() -> None:
    async with edge() as rig:
        calling(rig)
        made = await rig.client.chat.completions.create(
            model="toy", messages=ASK, tools=TOOLS, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
        )
        asked = prompt(rig)
        (tool,) = asked.tools
        assert (tool.name, tool.description, json.loads(tool.parameters)) == ("weather", "d", SCHEMA)
        assert json.loads(asked.variables) == {"enable_thinking": True}
        choice = made.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "so")
        assert choice.message.model_dump()["reasoning_content"] == "hm" and choice.message.tool_calls is not None
        found = [one for one in choice.message.tool_calls if one.type == "function"]
        assert [(one.function.name, one.function.arguments, one.id) for one in found] == [
            ("weather", '{"city":"é"}', "id1"),
            ("weather", "{}", "id2"),
        ]
        said = choice.message.model_dump(exclude_none=True)
        answers = [{"role": "tool", "tool_call_id": one.id, "content": "3"} for one in found]
        turns: list[Any] = [*ASK, said, *answers]
        await rig.client.chat.completions.create(model="toy", messages=turns, tools=TOOLS)
        assert prompt(rig).messages[1:] == (
            ChatMessage("assistant", "so", "hm", CALLS),
            ChatMessage("tool", "3", tool_call_id="id1"),
            ChatMessage("tool", "3", tool_call_id="id2"),
        )


async def test_calls_streamed() -> None:
    async with edge() as rig:
        calling(rig)
        stream = await rig.client.chat.completions.create(model="toy", messages=ASK, tools=TOOLS, stream=True)
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert [(call.index, call.id, call.function and call.function.arguments) for call in calls] == [
            (0, "id1", ""),
            (0, None, '{"city":'),
            (0, None, '"é"}'),
            (1, "id2", "{}"),
        ]
        assert "".join(delta.model_dump().get("reasoning_content") or "" for delta in deltas) == "hm"
        assert "".join(delta.content or "" for delta in deltas) == "so"
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_a_call_alone_has_no_content() -> None:
    async with edge() as rig:
        rig.ring.script = lambda submit: rig.ring.play(
            Text(submit.envelope, 0, (TokenRecord(1, b"x"),), "", 0, Admitted(3, 0, 8, Stops()), tool_calls=CALLS),
            Text(submit.envelope, 1, (), "", finish=FinishReason.EOS),
        )
        made = await rig.client.chat.completions.create(model="toy", messages=ASK, tools=TOOLS, tool_choice="auto")
        message = made.choices[0].message
        assert message.content is None
        turns: list[Any] = [*ASK, message.model_dump(exclude_none=True)]
        await rig.client.chat.completions.create(model="toy", messages=turns)
        assert prompt(rig).messages[1] == ChatMessage("assistant", None, tool_calls=CALLS)


async def test_tools_that_may_not_be_called_are_not_told() -> None:
    async with edge() as rig:
        calling(rig)
        await rig.client.chat.completions.create(model="toy", messages=ASK, tools=TOOLS, tool_choice="none")
        assert prompt(rig).tools == ()
        bare: list[Any] = [{"type": "function", "function": {"name": "clock"}}]
        await rig.client.chat.completions.create(model="toy", messages=ASK, tools=bare)
        assert prompt(rig).tools == (Tool("clock", None, '{"type": "object", "properties": {}}'),)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "code"}]}, "tools[0].type"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ],
)
async def test_what_cannot_be_done_is_refused(body: dict[str, Any], param: str) -> None:
    async with edge() as rig:
        wanted = {"model": "toy", "messages": ASK, "tools": TOOLS, **body}
        with pytest.raises(openai.APIStatusError) as caught:
            await rig.client.post("/chat/completions", body=wanted, cast_to=object)
        assert 400 <= caught.value.status_code < 502 and caught.value.param == param
