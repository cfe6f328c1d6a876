"""The bodies that others' benchmarks send, and what they read in the stream."""

from typing import Any

import httpx2
import msgspec
import pytest

from tests.services.edge.edge_rig import edge
from tests.services.edge.test_edge import answering

VLLM_OPTIONS: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
SGLANG_OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2, "stream": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": (
        "completions",
        {"prompt": "p", "repetition_penalty": 1.0, "max_tokens": 2, "logprobs": None, **VLLM_OPTIONS},
    ),
    "vllm chat": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "p"}]}],
            "max_completion_tokens": 2,
            **VLLM_OPTIONS,
        },
    ),
    "sglang": ("completions", {"prompt": "p", "best_of": 1, "ignore_eos": True, **SGLANG_OPTIONS}),
    "sglang chat": ("chat/completions", {"messages": [{"role": "user", "content": "p"}], **SGLANG_OPTIONS}),
}


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=list(BODIES))
async def test_a_benchmarks_body_is_taken_and_its_stream_read(path: str, body: dict[str, Any]) -> None:
    async with edge() as rig, httpx2.AsyncClient(timeout=60) as client:
        answering(rig, "x", "y")
        found = await client.post(f"{rig.url}/v1/{path}", json={"model": "toy", **body})
        assert found.status_code == 200, found.text
        *lines, done = [line.removeprefix("data: ") for line in found.text.splitlines() if line]
        assert done == "[DONE]"
        chunks = [msgspec.json.decode(line) for line in lines]
        told = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        assert "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in told) == "xy"
        usage = [chunk["usage"]["completion_tokens"] for chunk in chunks if not chunk["choices"]]
        assert usage == ([2] if "stream_options" in body else [])
