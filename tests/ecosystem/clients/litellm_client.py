"""litellm: two turns with a tool, and a stream."""

import sys

import litellm

url, model = sys.argv[1:]
litellm.telemetry = False
where = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "num_retries": 0}
schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "description": "the weather", "parameters": schema}}]
turns = [{"role": "user", "content": "What is the weather in Paris?"}]

first = litellm.completion(
    **where, messages=turns, tools=tools, tool_choice="required", max_tokens=200, parallel_tool_calls=False
)
(call,) = first.choices[0].message.tool_calls
assert call.function.name == "weather"
print("tools, required", flush=True)

turns += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "sunny"}]
second = litellm.completion(**where, messages=turns, tools=tools, max_tokens=8, temperature=0)
assert second.choices[0].message.role == "assistant"
print("a second turn with the tool's result", flush=True)

turns = [{"role": "user", "content": "Hello"}]
said = litellm.completion(**where, messages=turns, max_tokens=8, temperature=0)
turns += [said.choices[0].message, {"role": "user", "content": "Why?"}]
again = "".join(
    chunk.choices[0].delta.content or ""
    for chunk in litellm.completion(**where, messages=turns, max_tokens=8, temperature=0, stream=True)
)
assert said.choices[0].message.content and again
print("two turns, the second streamed", flush=True)
