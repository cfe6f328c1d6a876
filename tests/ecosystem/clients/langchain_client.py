"""langchain-openai: chat, stream, tools over two turns, structured output, a batch."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, max_tokens=200, temperature=0, max_retries=0)


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    return "sunny"


assert chat.invoke("Hello").content
print("chat", flush=True)
assert "".join(chunk.content for chunk in chat.stream("Hello"))
print("chat streamed", flush=True)
assert len(chat.batch(["Hello", "Good day"])) == 2
print("a batch", flush=True)
for method in ("json_schema", "function_calling"):
    found = chat.with_structured_output(City, method=method).invoke("Name a city.")
    assert isinstance(found, City), found
    print(f"structured output by {method}", flush=True)
turns = [HumanMessage("What is the weather in Paris?")]
asked = chat.bind_tools([weather], tool_choice="weather").invoke(turns)
(call,) = asked.tool_calls
turns += [asked, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
assert chat.bind_tools([weather]).invoke(turns)
print("a named tool, and a second turn with its result", flush=True)
