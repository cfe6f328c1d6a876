"""openai-agents: an agent with a tool, and with a structured answer, over chat completions."""

import asyncio
import sys
from typing import Literal

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from pydantic import BaseModel

url, name = sys.argv[1:]
set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
model = OpenAIChatCompletionsModel(model=name, openai_client=client)
asked: list[str] = []


class City(BaseModel):
    name: Literal["Paris", "Rome"]


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Returns the weather of a city."""
    asked.append(city)
    return "sunny"


async def main() -> None:
    settings = ModelSettings(max_tokens=200, temperature=0, tool_choice="required", parallel_tool_calls=False)
    agent = Agent("a", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)
    found = await Runner.run(agent, "What is the weather in Paris?", max_turns=3)
    assert asked and found.final_output is not None
    print("a tool, called and answered", flush=True)
    agent = Agent("b", model=model, output_type=City, model_settings=ModelSettings(max_tokens=200, temperature=0))
    assert isinstance((await Runner.run(agent, "Name a city.")).final_output, City)
    print("a structured answer", flush=True)
    streamed = Runner.run_streamed(Agent("c", model=model, model_settings=ModelSettings(max_tokens=8)), "Hello")
    assert [event async for event in streamed.stream_events()]
    print("a stream", flush=True)


asyncio.run(main())
