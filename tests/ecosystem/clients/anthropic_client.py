"""anthropic: messages, a stream of them, their number of tokens, a tool over two turns."""

import sys

import anthropic

url, model, key = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, auth_token=key, api_key=None, max_retries=0)
question = [{"role": "user", "content": "What is the capital of France?"}]
asked = {"model": model, "messages": question, "max_tokens": 16, "extra_body": {"temperature": 0}}


def saw(what: str) -> None:
    print(what, flush=True)


said = client.messages.create(**asked)
text = said.content[0].text
assert text and 0 < said.usage.output_tokens <= 16 and said.stop_reason in ("end_turn", "max_tokens")
saw("messages")

with client.messages.stream(**asked) as stream:
    pieces = list(stream.text_stream)
    final = stream.get_final_message()
assert "".join(pieces) == text == final.content[0].text and len(pieces) > 1
assert final.usage.output_tokens == said.usage.output_tokens
saw("messages streamed")

counted = client.messages.count_tokens(model=model, messages=question)
assert counted.input_tokens == said.usage.input_tokens
saw("count_tokens")

schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
tools = [{"name": "weather", "description": "the weather", "input_schema": schema}]
choice = {"type": "tool", "name": "weather"}
called = client.messages.create(**{**asked, "max_tokens": 100}, tools=tools, tool_choice=choice)
(call,) = [one for one in called.content if one.type == "tool_use"]
assert call.name == "weather" and call.input["city"] in ("Paris", "Rome") and called.stop_reason == "tool_use"
saw("a named tool")

result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
turns = [*question, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
last = client.messages.create(**{**asked, "messages": turns}, tools=tools)
assert last.role == "assistant" and last.content
saw("a second turn with the tool's result")
