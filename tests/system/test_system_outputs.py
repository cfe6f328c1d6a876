"""Several outputs of one request through the real ring: the same as alone, and each ends for itself."""

from sluice.v1 import inference_pb2

from tests.system.service import serve, spec


def test_many_outputs_stream_and_a_stop_string_ends_its_own() -> None:
    wanted = spec("def mean(values):", 24, n=4, seed=7, temperature=1.0)
    with serve() as service, service.stub() as stub:
        whole = stub.Generate(inference_pb2.GenerateRequest(spec=wanted), timeout=60)
        texts = [output.text for output in whole.outputs]
        assert [output.index for output in whole.outputs] == [0, 1, 2, 3] and len(set(texts)) > 1
        assert whole.usage.completion_tokens == 4 * 24
        stop = next(text[6:9] for text in texts if sum(text[6:9] in other for other in texts) < 4)
        wanted.stop.strings.append(stop)
        streamed, ended = [""] * 4, {}
        for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=wanted), timeout=60):
            if event.HasField("delta"):
                streamed[event.delta.output_index] += event.delta.text
            elif event.HasField("output_finished"):
                ended[event.output_finished.output_index] = event.output_finished.stop_match.text
        assert streamed == [text.split(stop)[0] for text in texts]
        assert ended == {at: stop if stop in text else "" for at, text in enumerate(texts)}
        best = spec("def mean(values):", 8, n=1, best_of=3, seed=7, temperature=1.0)
        beam = spec("def mean(values):", 8, n=2)
        beam.sampling.beam.width = 3
        assert len(stub.Generate(inference_pb2.GenerateRequest(spec=best), timeout=60).outputs) == 1
        answer = stub.Generate(inference_pb2.GenerateRequest(spec=beam), timeout=60)
        assert len(answer.outputs) == 2 and answer.params.sampling.beam.width == 3
