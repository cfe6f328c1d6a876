"""openai: Responses, streamed, stored, continued, with a structured answer and a tool."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

url, model, key = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
question = "What is the capital of France?"
asked = {"model": model, "temperature": 0, "max_output_tokens": 16}


class Answer(BaseModel):
    city: Literal["Paris", "Rome"]


def saw(what: str) -> None:
    print(what, flush=True)


said = client.responses.create(input=question, **asked)
assert said.output_text and said.usage.output_tokens <= 16
saw("a response")

with client.responses.stream(input=question, **asked) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
assert text == said.output_text
saw("streamed")

assert client.responses.retrieve(said.id).output_text == said.output_text
more = client.responses.create(input="Why?", previous_response_id=said.id, **asked)
assert more.usage.input_tokens > said.usage.input_tokens
saw("stored and continued")

parsed = client.responses.parse(input=question, text_format=Answer, **{**asked, "max_output_tokens": 100})
assert isinstance(parsed.output_parsed, Answer)
saw("parse")

tool = openai.pydantic_function_tool(Answer, name="answer")["function"]
called = client.responses.create(
    input=question,
    tools=[{"type": "function", **tool}],
    tool_choice={"type": "function", "name": "answer"},
    **{**asked, "max_output_tokens": 100},
)
(call,) = [one for one in called.output if one.type == "function_call"]
assert call.name == "answer" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
saw("a named tool")
