"""Values that a request cannot hold: each error names the option, and nothing is taken for something else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import sluice
from sluice.embeddings import embed_request
from sluice.ranking import classify_request, rerank_request, score_request
from sluice.spec import build

REQUESTS: dict[str, Callable[[Any], object]] = {
    "a generation": lambda options: build("p", options),
    "vectors": lambda options: embed_request("p", options),
    "classes": lambda options: classify_request("p", options),
    "a ranking": lambda options: rerank_request("q", ["d"], options),
    "scores": lambda options: score_request([("a", "b")], options),
}
UNFIT: dict[str, tuple[object, type[Exception]]] = {
    "top_k": (-1, ValueError),
    "max_tokens": (1.5, TypeError),
    "seed": (1 << 70, ValueError),
    "temperature": ("hot", TypeError),
    "n": (None, TypeError),
    "model": (5, TypeError),
    "bad_words": ("one", TypeError),
    "choices": ("one", TypeError),  # would be the choices o, n and e
    "stop": ([1], TypeError),
    "stop_token_ids": ([-1], ValueError),
    "logprobs": (-1, ValueError),
    "json_schema": ({"type": "object"}, TypeError),
    "priority": (1 << 40, ValueError),
    "regex": ("\ud800", ValueError),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_error_names_the_option(name: str) -> None:
    value, kind = UNFIT[name]
    with pytest.raises(kind, match=rf"^{name}: .+ does not fit: "):
        build("p", {name: value})  # type: ignore[misc] # the mistake


@pytest.mark.parametrize("of", REQUESTS)
def test_an_option_that_there_is_not_is_refused(of: str) -> None:
    with pytest.raises(TypeError, match=f"^'modle' is no option of {of}; there are model, "):
        REQUESTS[of]({"modle": "m"})


@pytest.mark.parametrize("of", list(REQUESTS)[1:])
def test_a_choice_that_there_is_not_is_refused(of: str) -> None:
    with pytest.raises(ValueError, match=r"^truncate: 'middle' is not one of none, left, right$"):
        REQUESTS[of]({"truncate": "middle"})
    with pytest.raises(TypeError, match=r"^revision: 1 does not fit"):
        REQUESTS[of]({"revision": 1})


@pytest.mark.parametrize("prompt", [b"text", bytearray(b"text"), None, [-1], ["text"], 5, "\ud800"])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(prompt: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^prompt: .+ does not fit: "):
        build(prompt, {})  # type: ignore[arg-type] # the mistake


@pytest.mark.parametrize("inputs", [b"text", [b"text"], [[-1]], [None]])
def test_inputs_that_are_neither_text_nor_ids_are_refused(inputs: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^inputs: .+ does not fit: "):
        embed_request(inputs, {})  # type: ignore[arg-type] # the mistake


def test_what_the_server_judges_is_sent() -> None:
    spec = build("p", {"temperature": math.nan, "stop": "end", "choices": ["a", "b"], "detach": True, "max_tokens": 0})
    assert math.isnan(spec.sampling.temperature) and list(spec.stop.strings) == ["end"]
    assert list(spec.constraint.choice.texts) == ["a", "b"] and spec.sampling.HasField("max_tokens")


def test_completion_in_a_terminal_shows_the_public_names() -> None:
    assert set(sluice.__all__) | {"__doc__"} <= set(dir(sluice))
