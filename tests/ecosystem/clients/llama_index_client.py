"""llama-index: chat, stream, completion, structured output."""

import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

url, model = sys.argv[1:]
options = {"api_base": url, "api_key": "none", "model": model, "max_tokens": 200, "temperature": 0, "max_retries": 0}
chat = OpenAILike(**options, is_chat_model=True, is_function_calling_model=True, should_use_structured_outputs=True)


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


assert chat.chat([ChatMessage(role="user", content="Hello")]).message.content
print("chat", flush=True)
assert [part.delta for part in chat.stream_chat([ChatMessage(role="user", content="Hello")])]
print("chat streamed", flush=True)
assert OpenAILike(**options, is_chat_model=False).complete("1, 2, 3,").text
print("completions", flush=True)
assert isinstance(chat.as_structured_llm(City).complete("Name a city.").raw, City)
print("structured output", flush=True)
