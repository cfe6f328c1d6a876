from typing import Any

import msgspec
import pytest
from sluice.v1 import types_pb2

from sluice_server.services.edge.conversation import messages_of
from sluice_server.services.edge.errors import EdgeError
from sluice_server.services.edge.wire_parts import Message


def message(**fields: Any) -> types_pb2.ChatMessage:  # noqa: ANN401 # any field of a message
    read = msgspec.json.decode(msgspec.json.encode({"role": "assistant", **fields}), type=Message)
    (made,) = messages_of([read])
    return made


def test_what_clients_send_back_is_taken() -> None:
    call = {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "parsed": {}}}
    said = message(
        content=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "annotations": []}],
        tool_calls=[{**call, "provider_specific_fields": None}],
        provider_specific_fields={"a": 1},
        reasoning_details=[],
        annotations=[],
        refusal=None,
        audio=None,
        function_call=None,
        prefix=False,
    )
    assert said == types_pb2.ChatMessage(
        role=types_pb2.ROLE_ASSISTANT,
        parts=[types_pb2.ContentPart(text="a")],
        tool_calls=[types_pb2.ToolCall(id="c", name="f", arguments="{}")],
    )


def test_texts_under_other_names() -> None:
    assert message(reasoning="hm", content="a").reasoning == "hm"
    assert message(reasoning="other", reasoning_content="hm", content="a").reasoning == "hm"
    assert [part.text for part in message(refusal="no", content=None).parts] == ["no"]
    assert [part.text for part in message(content=[{"type": "refusal", "refusal": "no"}]).parts] == ["no"]
    assert message(role="user", name="Ann", content="a").name == "Ann"


def test_an_assistant_may_have_said_nothing() -> None:
    assert [part.text for part in message(content=None, tool_calls=[], reasoning="hm").parts] == [""]
    with pytest.raises(EdgeError, match=r"^messages\[0\].content: is missing"):
        message(role="user", content=None)


@pytest.mark.parametrize("name", ["function_call", "audio", "prefix", "partial"])
def test_what_would_change_the_prompt_is_refused(name: str) -> None:
    with pytest.raises(EdgeError) as caught:
        message(content="a", **{name: True})
    assert (caught.value.param, caught.value.code) == (f"messages[0].{name}", "unsupported_parameter")
