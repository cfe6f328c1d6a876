"""instructor: an object by a tool, and by a JSON schema."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

url, model = sys.argv[1:]


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[30, 40]


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    found = client.chat.completions.create(
        model=model,
        response_model=Person,
        messages=[{"role": "user", "content": "Ann is 30 years old."}],
        max_tokens=200,
        seed=1,
        max_retries=0,
    )
    assert isinstance(found, Person)
    print(mode.name, flush=True)
