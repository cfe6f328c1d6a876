"""Chats of the contract: tools, calls and their answers, each checked and forwarded; sections in the answers."""

from typing import Any

import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import FinishReason
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.chat import MAX_VARIABLES_BYTES, chat_prompt, num_bytes
from sluice_server.services.messages.details import Admitted, TokenRecord
from sluice_server.services.messages.messages import Text
from sluice_server.services.messages.work import (
    ChatMessage,
    ChatPrompt,
    Generate,
    Stops,
    Tokenize,
    TokenPrompt,
    Tool,
    ToolCall,
)
from tests.services.gateway.fake_ring import SETTINGS, running, settings, stream_request, unary_request

ASK: dict[str, Any] = {"role": types_pb2.ROLE_USER, "parts": [{"text": "hi"}]}
CALL = {"id": "c1", "name": "f", "arguments": '{"a": 1}'}


def asked(output: dict[str, Any], **chat: Any) -> translate.TranslatedRequest:  # noqa: ANN401 # any field of the message
    made = types_pb2.Chat(**{"messages": [ASK], **chat})
    options = types_pb2.OutputOptions(**output)
    return translate.generation(types_pb2.GenerationSpec(chat=made, output=options), 0, SETTINGS)


def prompt(**chat: Any) -> ChatPrompt:  # noqa: ANN401 # any field of the message
    work = asked({}, **chat).work
    assert isinstance(work, Generate) and isinstance(work.prompt, ChatPrompt)
    return work.prompt


def test_tools_calls_and_answers_reach_the_template() -> None:
    messages = [
        ASK,
        {"role": types_pb2.ROLE_ASSISTANT, "tool_calls": [CALL], "reasoning": "hm"},
        {"role": types_pb2.ROLE_TOOL, "parts": [{"text": "3"}], "tool_call_id": "c1", "name": "f"},
    ]
    tools = [{"name": "f", "description": "d", "parameters": '{"type": "object"}'}, {"name": "g"}]
    made = prompt(messages=messages, tools=tools, template_variables='{"enable_thinking": false}')
    assert made.messages == (
        ChatMessage("user", "hi"),
        ChatMessage("assistant", None, "hm", (ToolCall("f", '{"a": 1}', "c1"),)),
        ChatMessage("tool", "3", tool_call_id="c1", name="f"),
    )
    assert made.tools == (
        Tool("f", "d", '{"type": "object"}'),
        Tool("g", None, '{"type": "object", "properties": {}}'),
    )
    assert made.variables == '{"enable_thinking": false}'


def test_text_parts_of_a_message_are_lines() -> None:
    parts = [{"text": "Look at this:"}, {"text": " a b"}, {"text": ""}]
    (message,) = prompt(messages=[{"role": types_pb2.ROLE_USER, "parts": parts}]).messages
    assert message.content == "Look at this:\n a b\n"


def test_every_message_may_have_an_author() -> None:
    (message,) = prompt(messages=[{**ASK, "name": "Ann"}]).messages
    assert message == ChatMessage("user", "hi", name="Ann")


@pytest.mark.parametrize(("mode", "num"), [(0, 1), (types_pb2.TOOL_MODE_AUTO, 1), (types_pb2.TOOL_MODE_NONE, 0)])
def test_the_model_is_told_of_tools_unless_it_may_not_call(mode: int, num: int) -> None:
    assert len(prompt(tools=[{"name": "f"}], tool_choice={"mode": mode}).tools) == num


BEGUN = {"role": types_pb2.ROLE_ASSISTANT, "parts": [{"text": "It is"}]}


def test_the_last_message_is_left_open_in_place_of_a_new_turn() -> None:
    made = prompt(messages=[ASK, BEGUN], continue_final_message=True)
    assert made.continue_final_message and not made.add_generation_prompt
    assert not prompt(messages=[ASK, BEGUN]).continue_final_message
    assert prompt(continue_final_message=False).add_generation_prompt


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ({"messages": [ASK, BEGUN], "add_generation_prompt": True}, "add_generation_prompt exclude each other"),
        ({"messages": [ASK]}, "its role is user"),
        ({"messages": [{**BEGUN, "tool_calls": [CALL]}]}, "has tool calls"),
    ],
)
def test_what_cannot_be_continued_is_refused(chat: dict[str, Any], words: str) -> None:
    with pytest.raises(ServiceError, match=rf"^chat.continue_final_message: .*{words}") as caught:
        prompt(**chat, continue_final_message=True)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "chat.continue_final_message")


def test_documents_are_counted_as_text_of_the_prompt() -> None:
    documents = ('{"title":"a"}', '{"text":"é"}')
    made = prompt(documents=documents)
    assert made.documents == documents and num_bytes(made) == num_bytes(prompt()) + 26
    with pytest.raises(ServiceError, match=r"^chat.documents\[1\]: is nested more than 8 deep"):
        prompt(documents=["{}", '{"a":' * 9 + "1" + "}" * 9])
    with pytest.raises(ServiceError, match=r"^prompt: has \d+ bytes"):
        asked({}, documents=['{"a":"' + "x" * 9000 + '"}'] * 200)


def test_a_template_of_a_request_is_taken_where_the_operator_says_so() -> None:
    with pytest.raises(ServiceError, match="--trust-request-chat-template") as caught:
        prompt(template="{{ messages }}")
    assert (caught.value.code, caught.value.field) == (Code.UNIMPLEMENTED, "chat.template")
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(**ASK)], template="{{ messages }}")
    made = chat_prompt(chat, settings(trust_request_chat_template=True))
    assert made.template == "{{ messages }}" and num_bytes(made) == num_bytes(prompt()) + 14


@pytest.mark.parametrize("name", ["chat_template", "continue_final_message", "documents"])
def test_a_variable_has_no_name_of_a_field(name: str) -> None:
    with pytest.raises(ServiceError, match=f"^chat.template_variables: '{name}' has a field of its own"):
        prompt(template_variables=f'{{"{name}": 1}}')


def test_special_tokens_are_added_to_text_and_not_to_chats_unless_the_request_says_otherwise() -> None:
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(**ASK)])
    for given, to_text, to_chat in ((None, True, False), (True, True, True), (False, False, False)):
        for spec, want in (
            (types_pb2.GenerationSpec(text="a"), to_text),
            (types_pb2.GenerationSpec(chat=chat), to_chat),
        ):
            if given is not None:
                spec.add_special_tokens = given
            work = translate.generation(spec, 0, SETTINGS).work
            assert isinstance(work, Generate) and not isinstance(work.prompt, TokenPrompt)
            assert work.prompt.add_special_tokens is want
            asked_tokens = inference_pb2.TokenizeRequest(add_special_tokens=given)
            if spec.HasField("text"):
                asked_tokens.text = spec.text
            else:
                asked_tokens.chat.CopyFrom(chat)
            tokens = translate.tokenization(asked_tokens, SETTINGS).work
            assert isinstance(tokens, Tokenize) and tokens.prompt == work.prompt


def test_whether_one_output_may_have_several_calls() -> None:
    assert prompt().parallel and not prompt(parallel_tool_calls=False).parallel
    with pytest.raises(ServiceError) as caught:
        asked({"split_sections": False}, parallel_tool_calls=False)
    assert caught.value.field == "chat.parallel_tool_calls"


def test_calls_in_parts_are_for_streams_with_sections() -> None:
    made = asked({"tool_call_parts": True}).work
    assert isinstance(made, Generate) and made.text.call_parts
    with pytest.raises(ServiceError) as caught:
        asked({"tool_call_parts": True, "split_sections": False})
    assert caught.value.field == "output.tool_call_parts"
    chat = types_pb2.Chat(
        messages=[types_pb2.ChatMessage(role=types_pb2.ROLE_USER, parts=[types_pb2.ContentPart(text="hi")])]
    )
    spec = types_pb2.GenerationSpec(chat=chat, output=types_pb2.OutputOptions(tool_call_parts=True))
    with pytest.raises(ServiceError) as caught:
        translate.whole(spec, 0, SETTINGS)
    assert caught.value.field == "output.tool_call_parts"


def test_the_interval_of_a_stream_is_in_tokens_and_for_streams_only() -> None:
    made = asked({"stream_interval": 8})
    assert isinstance(made.work, Generate) and made.work.text.stream_interval == 8
    assert made.effective is not None and made.effective.output.stream_interval == 8
    without = asked({})
    assert without.effective is not None and not without.effective.output.HasField("stream_interval")
    spec = types_pb2.GenerationSpec(text="hi", output=types_pb2.OutputOptions(stream_interval=8))
    with pytest.raises(ServiceError) as caught:
        translate.whole(spec, 0, SETTINGS)
    assert caught.value.field == "output.stream_interval"


TOOL = types_pb2.ROLE_TOOL
SAID = types_pb2.ROLE_ASSISTANT
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"name": "f"}] * 2}, "chat.tools[1].name"),
    ({"tools": [{"name": f"f{at}"} for at in range(129)]}, "chat.tools"),
    ({"tools": [{"name": ""}]}, "chat.tools[0].name"),
    ({"tools": [{"name": "a b"}]}, "chat.tools[0].name"),
    ({"tools": [{"name": "a" * 65}]}, "chat.tools[0].name"),
    ({"tools": [{"name": "f", "description": "x" * 16385}]}, "chat.tools[0].description"),
    ({"tools": [{"name": "f", "parameters": "x" * 65537}]}, "chat.tools[0].parameters"),
    ({"tools": [{"name": "f", "parameters": "[]"}]}, "chat.tools[0].parameters"),
    ({"tools": [{"name": "f", "parameters": '{"a": ' * 20000}]}, "chat.tools[0].parameters"),
    ({"tools": [{"name": "f", "parameters": '{"a": NaN}'}]}, "chat.tools[0].parameters"),
    ({"tool_choice": {"mode": 9}}, "chat.tool_choice.mode"),
    ({"tool_choice": {"mode": types_pb2.TOOL_MODE_REQUIRED}}, "chat.tool_choice.mode"),
    ({"tools": [{"name": "f"}], "tool_choice": {"name": "g"}}, "chat.tool_choice.name"),
    ({"tools": [{"name": "f"}], "tool_choice": {"name": ""}}, "chat.tool_choice.name"),
    ({"template_variables": "{"}, "chat.template_variables"),
    ({"template_variables": '{"messages": []}'}, "chat.template_variables"),
    ({"template_variables": " " * MAX_VARIABLES_BYTES + "{}"}, "chat.template_variables"),
    ({"messages": [{**ASK, "tool_calls": [CALL]}]}, "chat.messages[0].tool_calls"),
    ({"messages": [{**ASK, "reasoning": "x"}]}, "chat.messages[0].reasoning"),
    ({"messages": [{**ASK, "tool_call_id": "x"}]}, "chat.messages[0].tool_call_id"),
    ({"messages": [{**ASK, "role": TOOL, "name": "x" * 65}]}, "chat.messages[0].name"),
    ({"messages": [{**ASK, "role": SAID, "tool_calls": [CALL] * 129}]}, "chat.messages[0].tool_calls"),
    (
        {"messages": [{"role": SAID, "tool_calls": [{**CALL, "arguments": "3"}]}]},
        "chat.messages[0].tool_calls[0].arguments",
    ),
    ({"messages": [{"role": SAID, "tool_calls": [{**CALL, "name": ""}]}]}, "chat.messages[0].tool_calls[0].name"),
    ({"messages": [{"role": SAID}]}, "chat.messages[0].parts"),
]


@pytest.mark.parametrize(("chat", "field"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_refused_by_its_field(chat: dict[str, Any], field: str) -> None:
    with pytest.raises(ServiceError) as caught:
        prompt(**chat)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)
    assert len(caught.value.message) < 300


def test_tools_count_towards_the_prompt() -> None:
    tools = [{"name": f"f{at}", "parameters": '{"x": "' + "y" * 60_000 + '"}'} for at in range(20)]
    with pytest.raises(ServiceError) as caught:
        prompt(tools=tools)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"mode": types_pb2.TOOL_MODE_REQUIRED}, ("f", "g")),
        ({"name": "g"}, ("g",)),
        ({"mode": types_pb2.TOOL_MODE_AUTO}, ()),
        ({"mode": types_pb2.TOOL_MODE_NONE}, ()),
    ],
)
def test_calls_that_must_be_made(choice: dict[str, Any], names: tuple[str, ...]) -> None:
    made = prompt(tools=[{"name": "f"}, {"name": "g"}], tool_choice=choice)
    assert made.must_call == names and len(made.tools) in (2, 0)


def test_how_text_is_made_is_passed_on_and_echoed() -> None:
    made = asked({"skip_special_tokens": False, "split_sections": False})
    assert isinstance(made.work, Generate) and made.effective is not None
    assert (made.work.text.skip_special_tokens, made.work.text.split_sections) == (False, False)
    echoed = made.effective.output
    assert (echoed.skip_special_tokens, echoed.split_sections) == (False, False)


async def test_sections_come_as_their_own_fields() -> None:
    async with running() as rig:
        call = rig.stub.StreamGenerate(stream_request())
        envelope = (await rig.ring.next_submit()).envelope
        record = (TokenRecord(1, b"x"),)
        calls = (ToolCall("f", "{}", "id1"),)
        rig.ring.play(
            Text(envelope, 0, record, "", admitted=Admitted(3, 0, 8, Stops()), reasoning="why", num_reasoning=1),
            Text(envelope, 1, record, "", tool_calls=calls),
            Text(envelope, 2, (), "so", finish=FinishReason.EOS, tool_calls=calls),
        )
        events = [event async for event in call]
        deltas = [event.delta for event in events if event.HasField("delta")]
        assert "".join(one.reasoning for one in deltas) == "why" and "".join(one.text for one in deltas) == "so"
        assert [one.id for delta in deltas for one in delta.tool_calls] == ["id1", "id1"]
        assert events[-1].finished.usage.reasoning_tokens == 1


async def test_sections_of_a_whole_answer() -> None:
    async with running() as rig:
        call = rig.stub.Generate(unary_request())
        envelope = (await rig.ring.next_submit()).envelope
        rig.ring.play(
            Text(envelope, 0, (), "", admitted=Admitted(3, 0, 8, Stops()), reasoning="w"),
            Text(envelope, 0, (), "", finish=FinishReason.EOS, reasoning="hy", tool_calls=(ToolCall("f", "{}", "i"),)),
        )
        (output,) = (await call).outputs
        assert (output.text, output.reasoning, output.tool_calls[0].name) == ("", "why", "f")
