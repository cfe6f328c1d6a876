"""openai: chats, completions, streams, log probabilities, structured answers, tools over two turns."""

import sys
from typing import Literal

import openai
from pydantic import BaseModel

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
question = [{"role": "user", "content": "What is the capital of France?"}]


class Answer(BaseModel):
    city: Literal["Paris", "Rome"]
    continent: Literal["Europe", "Asia"]


def saw(what: str) -> None:
    print(what, flush=True)


assert model in [one.id for one in client.models.list()]
saw("models")

said = client.chat.completions.create(model=model, messages=question, max_completion_tokens=16, temperature=0)
assert said.choices[0].message.content and said.usage.completion_tokens <= 16
saw("chat")

chunks = list(
    client.chat.completions.create(
        model=model,
        messages=question,
        max_completion_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
)
streamed = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
assert streamed == said.choices[0].message.content and chunks[-1].usage.total_tokens == said.usage.total_tokens
saw("chat streamed")

text = client.completions.create(model=model, prompt="1, 2, 3,", max_tokens=4, temperature=0, echo=True, logprobs=2)
logprobs = text.choices[0].logprobs
assert text.choices[0].text.startswith("1, 2, 3,") and logprobs.token_logprobs[0] is None
assert "".join(logprobs.tokens) == text.choices[0].text
saw("completions with echo and logprobs")

many = client.completions.create(model=model, prompt=["a", "b"], max_tokens=2, stream=True)
assert {one.choices[0].index for one in many} == {0, 1}
saw("two prompts streamed together")

parsed = client.chat.completions.parse(
    model=model, messages=question, response_format=Answer, max_tokens=200, temperature=0
)
assert isinstance(parsed.choices[0].message.parsed, Answer)
saw("parse")

tool = openai.pydantic_function_tool(Answer, name="answer")
called = client.chat.completions.parse(
    model=model, messages=question, tools=[tool], tool_choice="required", max_tokens=200, parallel_tool_calls=False
)
(call,) = called.choices[0].message.tool_calls
assert isinstance(call.function.parsed_arguments, Answer) and called.choices[0].finish_reason == "tool_calls"
saw("tools, required and strict")

result = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
last = client.chat.completions.create(
    model=model, messages=[*question, called.choices[0].message, result], tools=[tool], max_tokens=8
)
assert last.choices[0].message.role == "assistant"
saw("a second turn with the tool's result")
