"""The requests of `vllm bench serve`, by vLLM's own code, unchanged: its bodies, and how it reads what is streamed.

The file is loaded alone: its package imports vLLM's engine, and with it torch.
"""

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import aiohttp

URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
NUM, LENGTH = 4, 8
PATH = "vllm/benchmarks/lib/endpoint_request_func.py"


def loaded() -> ModuleType:
    """The module of vLLM's request functions."""
    (path,) = (found for one in sys.path if (found := Path(one) / PATH).exists())
    spec = importlib.util.spec_from_file_location("endpoint_request_func", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def main() -> None:
    """Runs the kinds of requests that the service has routes for."""
    functions = loaded()
    async with aiohttp.ClientSession() as session:
        for backend, path, logprobs in (
            ("openai", "completions", 2),
            ("openai-chat", "chat/completions", None),
            ("openai-embeddings", "embeddings", None),
        ):
            asked = [
                functions.RequestFuncInput(
                    prompt=f"Say something about the number {at}.",
                    api_url=f"{URL}/v1/{path}",
                    prompt_len=9,
                    output_len=LENGTH,
                    model=MODEL,
                    logprobs=logprobs,
                    ignore_eos="embeddings" not in path,
                    request_id=f"bench-{at}",
                )
                for at in range(NUM)
            ]
            run = functions.ASYNC_REQUEST_FUNCS[backend]
            answers = await asyncio.gather(*(run(one, session) for one in asked))
            assert all(one.success for one in answers), [one.error for one in answers]
            if "embeddings" not in path:
                assert all(one.output_tokens == LENGTH and one.generated_text for one in answers), answers
            assert all(one.prompt_len > 1 for one in answers), answers
            print(f"{backend}: {len(answers)} requests, no failure")


asyncio.run(main())
