"""Converse against a real service: credit stops the engine, appended prompts answer as whole ones do."""

import queue
from collections.abc import Iterator

import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from tests.system.service import Service, generate, serve, spec

Frame = inference_pb2.ConverseResponse


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with serve() as running:
        yield running


class Talk:
    """A blocking client."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        self._frames: queue.SimpleQueue[inference_pb2.ConverseRequest | None] = queue.SimpleQueue()
        self.answers = stub.Converse(iter(self._frames.get, None), timeout=60)

    def send(self, tag: int, **frame: object) -> None:
        self._frames.put(inference_pb2.ConverseRequest(tag=tag, **frame))  # type: ignore[arg-type] # any frame

    def half_close(self) -> None:
        self._frames.put(None)

    def until(self, kind: str) -> list[Frame]:
        """The frames up to the next one of that kind."""
        frames: list[Frame] = []
        while not frames or frames[-1].WhichOneof("frame") != kind:
            frames.append(next(self.answers))
        return frames


def text_of(frames: list[Frame]) -> str:
    return "".join(frame.delta.text for frame in frames)


def test_a_reader_gets_what_it_granted_and_the_rest_when_it_grants_more(service: Service) -> None:
    with service.stub() as stub:
        expected = generate(stub, spec("Once upon a time", 100)).text
        asked = spec("Once upon a time", 100)
        asked.credit_window = 64
        talk = Talk(stub)
        talk.send(1, open=inference_pb2.Open(spec=asked))
        frames = talk.until("throttled")
        assert sum(frame.delta.consumed for frame in frames) == 64
        talk.send(1, grant=inference_pb2.Grant(tokens=1000))
        rest = talk.until("finished")
        talk.half_close()
        assert text_of(frames + rest) == expected and list(talk.answers) == []


def test_a_prompt_that_comes_in_pieces_answers_as_a_whole_one(service: Service) -> None:
    with service.stub() as stub:
        tokens = stub.Tokenize(inference_pb2.TokenizeRequest(text="Once upon a time there was a little girl")).tokens
        ids = [token.id for token in tokens]
        expected = generate(stub, spec(ids, 24)).text
        talk = Talk(stub)
        talk.send(1, open=inference_pb2.Open(spec=spec(ids[:3], 24), keep_input_open=True))
        for at in range(3, len(ids)):
            talk.send(1, append=inference_pb2.Append(token_ids=types_pb2.TokenIds(ids=[ids[at]])))
        talk.send(1, close_input=inference_pb2.CloseInput())
        talk.half_close()
        frames = list(talk.answers)
        assert text_of(frames) == expected
        assert frames[1].prompt_info.prompt_tokens == len(ids)


def test_pieces_of_text_answer_as_their_tokens_do(service: Service) -> None:
    with service.stub() as stub:
        pieces = ["Once upon", " a time", " there was"]
        tokens = [stub.Tokenize(inference_pb2.TokenizeRequest(text=piece)).tokens for piece in pieces]
        expected = generate(stub, spec([token.id for of_piece in tokens for token in of_piece], 24)).text
        talk = Talk(stub)
        talk.send(1, open=inference_pb2.Open(spec=spec(pieces[0], 24), keep_input_open=True))
        for piece in pieces[1:]:
            talk.send(1, append=inference_pb2.Append(text=piece))
        talk.half_close()
        assert text_of(list(talk.answers)) == expected


def test_what_the_engine_refuses_fails_one_generation(service: Service) -> None:
    with service.stub() as stub:
        talk = Talk(stub)
        talk.send(1, open=inference_pb2.Open(spec=spec("a", 8), keep_input_open=True))
        talk.send(1, append=inference_pb2.Append(text="word " * 20_000))
        talk.send(2, open=inference_pb2.Open(spec=spec("a", 8)))
        talk.half_close()
        frames = list(talk.answers)
        (failed,) = [frame.failed for frame in frames if frame.WhichOneof("frame") == "failed"]
        assert "context" in failed.message or "model allows" in failed.message
        assert [frame.tag for frame in frames if frame.WhichOneof("frame") == "finished"] == [2]


def test_a_generation_goes_on_from_what_its_client_has(service: Service) -> None:
    with service.stub() as stub:
        asked = spec("Once upon a time", 40, temperature=1.0)
        events = list(stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=asked), timeout=60))
        accepted, deltas = events[0].accepted, [event.delta for event in events if event.HasField("delta")]
        had, rest = deltas[:1], deltas[1:]  # the first is alone; how many follow depends on the machine's speed
        ids = [token.id for delta in had for token in delta.tokens]
        again = types_pb2.GenerationSpec(text="Once upon a time", revision=accepted.revision)
        again.sampling.CopyFrom(accepted.params.sampling)
        again.stop.CopyFrom(accepted.params.stop)
        again.resume.generation_id, again.resume.after_seq = "f" * 32 + ".gone", had[-1].seq
        again.resume.outputs.add(output_index=0, token_ids=ids)
        events_after = list(stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(spec=again), timeout=60))
        after = [event.delta for event in events_after if event.HasField("delta")]
        assert "".join(delta.text for delta in after) == "".join(delta.text for delta in rest)
        assert after[0].seq == had[-1].seq + 1
