"""Scores of pairs over HTTP: vLLM's /score and /v1/score."""

import uuid
from collections.abc import Callable, Sequence
from typing import Literal

import grpc
import msgspec
from sluice.v1 import inference_pb2, inference_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response

from sluice_server.services.edge.embeddings import TRUNCATE, truncation_of
from sluice_server.services.edge.errors import bad_request, naming
from sluice_server.services.edge.names import FieldNames
from sluice_server.services.edge.requests import metadata_of, read_body, until_gone
from sluice_server.services.edge.responses import as_json
from sluice_server.services.edge.wire import decode

MAX_PAIRS = 2048  # of the contract
MAX_CHARACTERS = 16 << 20  # of all pairs: more is no message that a gateway takes


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of /score."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    instruction: str | None = None
    user: str | None = None  # a label, without effect


class Scoring:
    """The handler of the route."""

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float]) -> None:
        """`clock` gives the seconds since 1970 for the answers."""
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._clock = clock

    async def score(self, request: Request) -> Response:
        """POST /score."""
        asked = decode(await read_body(request), ScoreBody)
        pairs = pairs_of(asked.text_1, asked.text_2)
        wanted = inference_pb2.ScoreRequest(
            model=asked.model or None, pairs=pairs, instruction=asked.instruction, truncate=truncation_of(asked)
        )
        with naming(pair_names(asked)):
            found = await until_gone(request.receive, self._inference.Score(wanted, metadata=metadata_of(request)))
        num = found.usage.prompt_tokens
        return as_json(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(self._clock()),
                "model": found.model,
                "data": [{"index": at, "object": "score", "score": one} for at, one in enumerate(found.scores)],
                "usage": {"prompt_tokens": num, "total_tokens": num},
            }
        )


def pair_names(asked: ScoreBody) -> FieldNames:
    """Returns the names of the texts in errors; a whole pair is named by its second text."""
    first = "text_1" if isinstance(asked.text_1, str) else "text_1[]"
    second = "text_2" if isinstance(asked.text_2, str) else "text_2[]"
    return FieldNames({"pairs": second, "pairs.first": first, "pairs.second": second, "truncate": TRUNCATE})


def pairs_of(first: str | Sequence[str], second: str | Sequence[str]) -> list[inference_pb2.TextPair]:
    """Returns the pairs: one first text with each second one, or as many of both. Raises EdgeError naming the text."""
    firsts = [first] if isinstance(first, str) else first
    seconds = [second] if isinstance(second, str) else second
    for name, given, texts in (("text_1", first, firsts), ("text_2", second, seconds)):
        if not texts:
            raise bad_request(name, "is empty; send at least one text")
        empty = next((at for at, text in enumerate(texts) if not text), None)
        if empty is not None:
            field = name if isinstance(given, str) else f"{name}[{empty}]"
            raise bad_request(field, "is empty; send at least one byte of text")
    if len(firsts) not in (1, len(seconds)):
        raise bad_request("text_1", f"has {len(firsts)} texts, and text_2 has {len(seconds)}: send one, or as many")
    if len(seconds) > MAX_PAIRS:
        raise bad_request("text_2", f"has {len(seconds)} texts; at most {MAX_PAIRS}")
    if len(firsts) == 1:
        if len(firsts[0]) * len(seconds) > MAX_CHARACTERS:
            text = f"has {len(firsts[0])} characters, once for each of {len(seconds)} pairs; at most {MAX_CHARACTERS}"
            raise bad_request("text_1", text)
        firsts = [firsts[0]] * len(seconds)
    return [inference_pb2.TextPair(first=one, second=other) for one, other in zip(firsts, seconds, strict=True)]
