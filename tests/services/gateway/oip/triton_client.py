"""A program, not a test: runs Triton's own client against an address and prints its findings as JSON.

A process of its own, as its messages and ours have the same names and one process has one registry of them.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.grpc.model_config_pb2 import DataType
from tritonclient.utils import InferenceServerException

KEY = {"authorization": "Bearer k"}


def inputs(text: str, stream: bool, sampling: dict[str, object], *switches: str) -> list[Any]:
    made = [("text_input", "BYTES", text.encode()), ("stream", "BOOL", stream)]
    made += [("sampling_parameters", "BYTES", json.dumps(sampling).encode())]
    made += [(switch, "BOOL", True) for switch in switches]
    found = []
    for name, datatype, value in made:
        tensor = triton.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(np.array([value], dtype=bool if datatype == "BOOL" else np.object_))
        found.append(tensor)
    return found


def outputs(result: Any) -> dict[str, object]:  # noqa: ANN401 # untyped library
    response = result.get_response()
    found: dict[str, object] = {"id": response.id}
    for one in response.outputs:
        value = result.as_numpy(one.name)[0]
        found[one.name] = value.decode() if isinstance(value, bytes) else int(value)
    return found


async def streamed(client: Any, requests: list[dict[str, Any]]) -> list[dict[str, object]]:  # noqa: ANN401 # as above
    """All responses to `requests`, sent on one stream."""

    async def all_requests() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield request

    found = []
    async for result, error in client.stream_infer(all_requests(), headers=KEY):
        found.append({"error": error.message()} if error is not None else outputs(result))
    return found


def counted(response: Any) -> dict[str, object]:  # noqa: ANN401 # as above
    (one,) = response.model_stats
    stats = one.inference_stats
    assert one.last_inference and one.inference_count == stats.success.count
    return {
        "name": one.name,
        "success": stats.success.count,
        "fail": stats.fail.count,
        "has_time": stats.success.ns > 0,
        "phases": stats.compute_infer.count,
    }


async def main(address: str, model: str) -> dict[str, object]:
    async with triton.InferenceServerClient(address) as client:
        small: dict[str, object] = {"max_tokens": "3", "temperature": 0, "ignore_eos": True}
        asked = [
            {"model_name": model, "request_id": str(at), "inputs": inputs(f"p{at}", True, small)} for at in range(2)
        ]
        extras = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
        last = {"inputs": inputs("q", False, small, *extras)}
        wrong = {"model_name": model, "request_id": "w", "inputs": inputs("p", True, {"temperature": 1000})}
        try:
            await client.infer("none", inputs("p", False, small), headers=KEY)
            refused = ""
        except InferenceServerException as error:
            refused = str(error.status())
        whole = outputs(await client.infer(model, inputs("p", False, small), headers=KEY))
        two, extra = await streamed(client, asked), [{"model_name": model, "request_id": "x", **last}]
        config = (await client.get_model_config(model, headers=KEY)).config
        return {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready() and await client.is_model_ready(model),
            "other": await client.is_model_ready("none"),
            "server": (await client.get_server_metadata(headers=KEY)).name,
            "tensors": [one.name for one in (await client.get_model_metadata(model, headers=KEY)).inputs],
            "whole": whole,
            "streams": two,
            "extras": await streamed(client, extra),
            "mixed": await streamed(client, [wrong, asked[0]]),
            "refused": refused,
            "config": {
                "name": config.name,
                "input": [one.name for one in config.input][:3],
                "types": [DataType.Name(one.data_type) for one in config.input][:3],
                "optional": [one.optional for one in config.input][:3],
                "decoupled": config.model_transaction_policy.decoupled,
            },
            "index": [
                [one.name, one.version, one.state, one.reason]
                for one in (await client.get_model_repository_index(headers=KEY)).models
            ],
            "statistics": counted(await client.get_inference_statistics(model, headers=KEY)),
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
