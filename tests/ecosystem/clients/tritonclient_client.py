"""tritonclient: what the server and its model say of themselves, an inference, two on one stream, the statistics."""

import json
import queue
import sys

import numpy as np
import tritonclient.grpc as triton

address, model = sys.argv[1:]
PROMPT = "The capital of France is"
SAMPLING = {"max_tokens": "4", "temperature": 0, "ignore_eos": True}


def saw(what: str) -> None:
    print(what, flush=True)


def inputs(text: str, *, stream: bool) -> list[triton.InferInput]:
    made = []
    for name, datatype, value in (
        ("text_input", "BYTES", text.encode()),
        ("stream", "BOOL", stream),
        ("sampling_parameters", "BYTES", json.dumps(SAMPLING).encode()),
    ):
        tensor = triton.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(np.array([value], dtype=bool if datatype == "BOOL" else np.object_))
        made.append(tensor)
    return made


def text_of(result: triton.InferResult) -> str:
    return result.as_numpy("text_output")[0].decode()


with triton.InferenceServerClient(address) as client:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(model)
    assert not client.is_model_ready("none") and client.get_server_metadata().name == "sluice"
    saw("health")
    saw("the server's metadata")

    assert "text_input" in [one.name for one in client.get_model_metadata(model).inputs]
    config = client.get_model_config(model).config
    assert config.name == model and config.model_transaction_policy.decoupled
    assert [(one.name, one.state) for one in client.get_model_repository_index().models] == [(model, "READY")]
    saw("the model's metadata and configuration")
    saw("the index")

    whole = text_of(client.infer(model, inputs(PROMPT, stream=False)))
    assert whole
    saw("an inference")

    found: queue.Queue[tuple[triton.InferResult | None, Exception | None]] = queue.Queue()
    client.start_stream(lambda result, error: found.put((result, error)))
    for name in ("a", "b"):
        asked = inputs(PROMPT, stream=True)
        client.async_stream_infer(model, asked, request_id=name, enable_empty_final_response=True)
    client.stop_stream()  # ends when all answers are there
    texts = {"a": "", "b": ""}
    while not found.empty():
        result, error = found.get()
        assert error is None, error
        if result.get_response().outputs:
            texts[result.get_response().id] += text_of(result)
    assert {PROMPT + text for text in texts.values()} == {whole}  # an answer in one has the prompt too, as in Triton
    saw("two on one stream")

    (statistics,) = client.get_inference_statistics(model).model_stats
    assert statistics.name == model and statistics.inference_stats.success.count >= 3
    saw("the statistics")
