"""Classes of inputs, rankings of documents and scores of pairs: the requests from plain values, and the answers."""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias, TypedDict

from sluice.embeddings import Input, add_inputs, set_options
from sluice.options import check_names
from sluice.v1 import inference_pb2, types_pb2

Pair: TypeAlias = tuple[str, str]


class ClassifyOptions(TypedDict, total=False):
    """Which model classifies, and how. The comments of `ClassifyRequest` explain each."""

    model: str
    revision: str
    truncate: Literal["none", "left", "right"]


class RerankOptions(TypedDict, total=False):
    """Which model ranks, by what, and how many documents come back. The comments of `RerankRequest` explain each."""

    model: str
    revision: str
    top_n: int
    instruction: str
    truncate: Literal["none", "left", "right"]


class ScoreOptions(TypedDict, total=False):
    """Which model scores, and by what. The comments of `ScoreRequest` explain each."""

    model: str
    revision: str
    instruction: str
    truncate: Literal["none", "left", "right"]


class Classifications:
    """The classes of a call's inputs.

    Attributes:
        response: the answer as the contract has it.
    """

    def __init__(self, response: inference_pb2.ClassifyResponse) -> None:
        self.response = response

    def __len__(self) -> int:
        return len(self.response.results)

    def __getitem__(self, index: int) -> list[float]:
        """Returns the scores of the input with that index, in the order of `labels`."""
        return list(self.response.results[index].scores)

    @property
    def labels(self) -> list[str]:
        """The names of the classes."""
        return list(self.response.labels)

    def label(self, index: int) -> str:
        """Returns the class with the highest score for the input with that index."""
        scores = self[index]
        return self.response.labels[scores.index(max(scores))]

    @property
    def usage(self) -> types_pb2.Usage:
        """Tokens of all inputs."""
        return self.response.usage


class Ranking:
    """The documents of a call, the best first; each has `index` and `score`.

    Attributes:
        response: the answer as the contract has it.
    """

    def __init__(self, response: inference_pb2.RerankResponse) -> None:
        self.response = response

    def __len__(self) -> int:
        return len(self.response.results)

    def __iter__(self) -> Iterator[inference_pb2.RankedDocument]:
        return iter(self.response.results)

    def __getitem__(self, rank: int) -> inference_pb2.RankedDocument:
        """Returns the document of that rank; 0 is the best."""
        return self.response.results[rank]

    @property
    def usage(self) -> types_pb2.Usage:
        """Tokens of the query and each document."""
        return self.response.usage


class Scores:
    """The scores of a call's pairs, in their order.

    Attributes:
        response: the answer as the contract has it.
    """

    def __init__(self, response: inference_pb2.ScoreResponse) -> None:
        self.response = response

    def __len__(self) -> int:
        return len(self.response.scores)

    def __iter__(self) -> Iterator[float]:
        return iter(self.response.scores)

    def __getitem__(self, index: int) -> float:
        """Returns the score of the pair with that index."""
        return self.response.scores[index]

    @property
    def usage(self) -> types_pb2.Usage:
        """Tokens of all pairs."""
        return self.response.usage


def classify_request(inputs: Input | Sequence[Input], options: ClassifyOptions) -> inference_pb2.ClassifyRequest:
    """Returns the request for one input or several. Raises TypeError and ValueError, which name the option."""
    check_names(options, ClassifyOptions.__annotations__, "classes")
    request = inference_pb2.ClassifyRequest()
    set_options(request, options)
    add_inputs(request.inputs, inputs)
    return request


def rerank_request(query: str, documents: Sequence[str], options: RerankOptions) -> inference_pb2.RerankRequest:
    """Returns the request for a query and its documents. Raises TypeError and ValueError, which name the option."""
    if isinstance(documents, str):
        raise TypeError("documents is one text: give a list of texts")
    check_names(options, RerankOptions.__annotations__, "a ranking")
    request = inference_pb2.RerankRequest(query=query, documents=documents)
    set_options(request, options)
    return request


def score_request(pairs: Sequence[Pair], options: ScoreOptions) -> inference_pb2.ScoreRequest:
    """Returns the request for pairs of texts. Raises TypeError and ValueError, which name the option."""
    check_names(options, ScoreOptions.__annotations__, "scores")
    request = inference_pb2.ScoreRequest()
    set_options(request, options)
    for first, second in pairs:
        request.pairs.add(first=first, second=second)
    return request
