"""`LLM` over ranks that it starts: the answers of one, and the end of all with it or with one of them."""

from typing import Any

import psutil
import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.offline import LLM, SamplingParams

PROMPTS = ["def mean(values):", "import os", "class Stack:", "# reads a file\n"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"threads": 1, "dtype": "float32", "max_num_seqs": 8, "allow_shared_cores": True}

pytestmark = pytest.mark.long


def ids(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    with LLM("demo", **OPTIONS) as llm:
        return ids(llm)


def ranks() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "worker-0-" in " ".join(one.cmdline())]


@pytest.mark.parametrize("shape", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_answer_as_one_and_end_with_it(
    want: list[list[int]], shape: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM("demo", **OPTIONS, **shape) as llm:
        assert len(ranks()) == 1
        assert ids(llm) == want
        next(llm.stream(PROMPTS[0], GREEDY))  # and never goes on
        assert ids(llm) == want
    assert not ranks()
    assert "ERROR" not in capfd.readouterr().err


def test_the_loss_of_a_rank_is_said_and_nothing_is_left() -> None:
    with LLM("demo", **OPTIONS, tensor_parallel_size=2) as llm:
        ranks()[0].kill()
        with pytest.raises(ServiceError, match="close this LLM, and make a new one") as caught:
            ids(llm)
        assert caught.value.reason == "DEVICE_LOST"
        with pytest.raises(ServiceError, match="close this LLM, and make a new one"):
            ids(llm)
    assert not ranks()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size: 3 does not divide the model's"),
        ({"pipeline_parallel_size": 99}, "--pipeline-parallel-size: 99 is above the model's"),
        ({"tensor_parallel_size": 2, "sum_dtype": "int8"}, "--sum-dtype: int8 is for sums that travel between hosts"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ServiceError, match=text):
        LLM("demo", **OPTIONS, **options)
    assert not ranks()
