"""Several outputs of one request through the real ring: indexed in the stream, each with its own end."""

from typing import TypeAlias

import grpc
import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from tests.system.service import generate, serve, spec

Stub: TypeAlias = inference_pb2_grpc.InferenceServiceStub
PROMPT = "def mean(values):"


def wanted(num: int = 12, **sampling: float) -> types_pb2.GenerationSpec:
    """A sampled request; the seed is fixed."""
    return spec(PROMPT, num, **{"temperature": 1.0, "seed": 5, **sampling})


class Streamed:
    """The content of a stream, by output."""

    def __init__(
        self,
        stub: Stub,
        request: types_pb2.GenerationSpec,
        cancel: int | None = None,
    ) -> None:
        self.text: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, types_pb2.OutputFinished] = {}
        self.finished: types_pb2.Finished | None = None
        generation_id, seqs = "", []
        for event in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=request), timeout=60):
            match event.WhichOneof("event"):
                case "accepted":
                    generation_id = event.accepted.generation_id
                case "delta":
                    index = event.delta.output_index
                    assert index not in self.ends, "text behind the end of its output"
                    self.text[index] = self.text.get(index, "") + event.delta.text
                    self.ids.setdefault(index, []).extend(token.id for token in event.delta.tokens)
                    seqs.append(event.delta.seq)
                    if cancel is not None and len(self.ids) > 1:
                        self._cancel(stub, generation_id, cancel)
                        cancel = None
                case "output_finished":
                    self.ends[event.output_finished.output_index] = event.output_finished
                case "finished":
                    self.finished = event.finished
        assert seqs == list(range(1, len(seqs) + 1))

    def _cancel(self, stub: Stub, generation_id: str, index: int) -> None:
        request = inference_pb2.CancelGenerationRequest(generation_id=generation_id, output_index=index)
        answer = stub.CancelGeneration(request)
        assert answer.found == inference_pb2.GENERATION_STATE_RUNNING
        with pytest.raises(grpc.RpcError, match="output_index"):
            request.output_index = 9
            stub.CancelGeneration(request)


def test_outputs_of_one_request() -> None:
    with serve() as service, service.stub() as stub:
        alone = generate(stub, wanted())
        three = stub.Generate(inference_pb2.GenerateRequest(spec=wanted(n=3)), timeout=60)
        assert [output.index for output in three.outputs] == [0, 1, 2]
        assert three.outputs[0].text == alone.text  # the first does not depend on company
        assert len({output.text for output in three.outputs}) == 3
        assert three.usage.completion_tokens == 36 and three.params.sampling.n == 3

        streamed = Streamed(stub, wanted(n=3))
        assert streamed.text == {output.index: output.text for output in three.outputs}
        assert {end.completion_tokens for end in streamed.ends.values()} == {12} and len(streamed.ends) == 3
        assert streamed.finished is not None and streamed.finished.usage.completion_tokens == 36

        # A stop string of one output touches no other.
        text = three.outputs[1].text
        stop = next(text[i : i + 3] for i in range(2, 40) if text[i : i + 3] not in three.outputs[0].text)
        with_stop = wanted(n=3)
        with_stop.stop.strings.append(stop)
        stopped = Streamed(stub, with_stop)
        assert stopped.text[0] == three.outputs[0].text
        assert stopped.text[1] == text[: text.index(stop)]
        assert stopped.ends[1].finish_reason == types_pb2.FINISH_REASON_STOP_STRING
        assert stopped.ends[1].stop_match.text == stop
        assert stopped.ends[0].finish_reason == types_pb2.FINISH_REASON_LENGTH

        cancelled = Streamed(stub, wanted(1500, n=3), cancel=1)
        assert cancelled.ends[1].finish_reason == types_pb2.FINISH_REASON_CANCELLED
        assert cancelled.ends[1].completion_tokens == len(cancelled.ids[1]) < 1500
        assert len(cancelled.ids[0]) == len(cancelled.ids[2]) == 1500

        best = stub.Generate(inference_pb2.GenerateRequest(spec=wanted(n=1, best_of=3)), timeout=60)
        assert best.outputs[0].text in {output.text for output in three.outputs}

        search = wanted(temperature=0.0)
        search.sampling.n = 2
        search.sampling.beam.width = 4
        beams = stub.Generate(inference_pb2.GenerateRequest(spec=search), timeout=60)
        assert len(beams.outputs) == 2 and beams.outputs[0].text != beams.outputs[1].text
        assert beams.params.sampling.beam.width == 4 and beams.params.sampling.beam.length_penalty == 1.0
        assert Streamed(stub, search).text == {output.index: output.text for output in beams.outputs}

        wrong: list[tuple[dict[str, float], str]] = [
            ({"n": 0}, "n"),
            ({"n": 129}, "128"),
            ({"n": 3, "best_of": 2}, "best_of"),
            ({"best_of": 0}, "best_of"),
        ]
        for sampling, said in wrong:
            with pytest.raises(grpc.RpcError) as caught:
                generate(stub, spec(PROMPT, 4, **sampling))
            assert isinstance(caught.value, grpc.Call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in (caught.value.details() or "")
