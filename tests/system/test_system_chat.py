"""Chats through the real ring: tools in the prompt, reasoning apart from the text, templates that do not end; what a
template is given over HTTP."""

import json
from pathlib import Path

import grpc
import httpx2
import pytest
from sluice.v1 import inference_pb2, types_pb2

from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe, put_before
from tests.system.service import serve

# Opens the reasoning, shows the tools, and does not end when it is asked for that.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.content == 'loop' %}" + "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3 + "{% endif %}"
    "{% endfor %}{% for d in documents or [] %}<doc>{{ d.text }}</doc>{% endfor %}"
    "{{ tools | tojson if tools else '' }}{{ '<think>' if thinking else '</think>' }}"
)
ASK = {"role": types_pb2.ROLE_USER, "parts": [{"text": "hello"}]}
TOOLS = [{"name": "weather", "parameters": '{"type": "object"}'}]


def ask(**chat: object) -> inference_pb2.GenerateRequest:
    made = types_pb2.Chat(**{"messages": [ASK], **chat})  # type: ignore[arg-type] # mixed
    params = types_pb2.SamplingParams(max_tokens=8, temperature=0.0)
    stop = types_pb2.StopConditions(ignore_eos=True)
    return inference_pb2.GenerateRequest(spec=types_pb2.GenerationSpec(chat=made, sampling=params, stop=stop))


def test_chats(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape(vocab=400, context=1024))
    put_before(byte_level_bpe(tmp_path), "<s>", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    options = ("--dtype", "float32", "--trust-request-chat-template", "--http", "127.0.0.1:0")
    with serve("--model", str(tmp_path), *options) as service, service.stub() as stub:
        plain = stub.Generate(ask(), timeout=60)
        assert plain.outputs[0].text and not plain.outputs[0].reasoning and plain.usage.reasoning_tokens == 0
        thinking = stub.Generate(ask(template_variables='{"thinking": true}'), timeout=60)
        assert thinking.outputs[0].reasoning and not thinking.outputs[0].text
        assert thinking.usage.reasoning_tokens == 8
        whole = ask(template_variables='{"thinking": true}')
        whole.spec.output.split_sections = False
        assert stub.Generate(whole, timeout=60).outputs[0].text.strip("\n") == thinking.outputs[0].reasoning
        with_tools = stub.Generate(ask(tools=TOOLS), timeout=60).usage.prompt_tokens
        assert with_tools > plain.usage.prompt_tokens
        none = ask(tools=TOOLS, tool_choice={"mode": types_pb2.TOOL_MODE_NONE})
        assert stub.Generate(none, timeout=60).usage.prompt_tokens == plain.usage.prompt_tokens
        echoed = ask()
        echoed.spec.output.echo, echoed.spec.truncate_prompt_tokens = True, 3
        answer = stub.Generate(echoed, timeout=60)
        assert (
            b"".join(one.piece for one in answer.prompt_info.tokens).endswith(b">") and answer.usage.prompt_tokens == 3
        )
        events = list(stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=echoed.spec), timeout=60))
        assert len(events[1].prompt_info.tokens) == events[1].prompt_info.prompt_tokens == 3
        call = {"name": "weather", "arguments": json.dumps({"city": "é"}), "id": "c"}
        said = {"role": types_pb2.ROLE_ASSISTANT, "tool_calls": [call]}
        assert stub.Generate(ask(messages=[ASK, said]), timeout=60).usage.prompt_tokens > plain.usage.prompt_tokens
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(ask(messages=[{**ASK, "parts": [{"text": "loop"}]}]), timeout=60)
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "did not end within 1 s" in (caught.value.details() or "")
        assert stub.Generate(ask(), timeout=60).outputs[0].text == plain.outputs[0].text
        check_what_a_template_is_given(service.http)


def check_what_a_template_is_given(url: str) -> None:
    """Each field, in a chat over HTTP, against a completion of the text that it makes."""
    prompt = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "add_special_tokens": False, "echo": True}
    hello, begun = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "It is <s>"}

    def answered(messages: object, text: str, **fields: object) -> None:
        asked = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        found = httpx2.post(url + "/v1/chat/completions", json=asked, timeout=60).json()
        want = httpx2.post(url + "/v1/completions", json={**prompt, "prompt": text}, timeout=60).json()
        assert text + found["choices"][0]["message"]["content"] == want["choices"][0]["text"], (found, want)
        assert found["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]

    answered([hello], "hello</think>")
    answered([hello, {**begun, "content": "It is"}], "helloIt is", continue_final_message=True)
    answered([hello], "hello<doc>é</doc></think>", documents=[{"text": "é"}])
    answered([hello], "</s>hello", chat_template="</s>{{ messages[0].content }}")
    tokens = httpx2.post(
        url + "/tokenize", json={"messages": [hello, begun], "continue_final_message": True}, timeout=60
    ).json()
    assert 0 not in tokens["tokens"]
    plain, added = (
        httpx2.post(url + "/tokenize", json={"messages": [hello], "add_special_tokens": value}, timeout=60).json()[
            "tokens"
        ]
        for value in (False, True)
    )
    assert added == [0, *plain]
