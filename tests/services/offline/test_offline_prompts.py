"""Prompts from Python values: one or several, and what is neither a text nor token ids is refused."""

import pytest
from sluice.embeddings import add_inputs
from sluice.v1 import inference_pb2

from sluice_server.services.offline.errors import PromptError
from sluice_server.services.offline.prompts import prompts_of, specs_of


def test_one_prompt_or_several() -> None:
    assert prompts_of("a") == ["a"] and prompts_of([1, 2]) == [[1, 2]]
    both: list[str | list[int]] = ["a", [1, 2]]
    assert prompts_of(both) == both and not prompts_of([])


@pytest.mark.parametrize("prompt", [b"text", bytearray(b"text"), None, 5])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    (found,) = prompts_of(prompt)  # type: ignore[arg-type] # the mistake
    with pytest.raises(PromptError, match=rf"^prompts\[0\]: prompt: {type(prompt).__name__} is neither a text nor"):
        specs_of([found], [None])


def test_bytes_are_no_input_of_vectors() -> None:
    with pytest.raises(TypeError, match=r"^inputs: .* a list of token ids is wanted$"):
        add_inputs(inference_pb2.EmbedRequest().inputs, prompts_of(b"text"))
