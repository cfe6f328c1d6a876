"""pydantic-ai: a text, a stream, an object by the provider's JSON schema and by a tool."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none"))
settings = {"max_tokens": 200, "temperature": 0}


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


async def main() -> None:
    agent = Agent(model, instructions="Be brief.", model_settings=settings)
    assert (await agent.run("Hello")).output
    print("a text", flush=True)
    async with agent.run_stream("Hello") as stream:
        assert [part async for part in stream.stream_text(delta=True)]
    print("a text streamed", flush=True)
    for kind in (NativeOutput, ToolOutput):
        found = await Agent(model, output_type=kind(City), model_settings=settings).run("Name a city.")
        assert isinstance(found.output, City)
        print(kind.__name__, flush=True)


asyncio.run(main())
