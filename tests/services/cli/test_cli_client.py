"""The CLI's view of the contract's answers."""

import json

import pytest
import sluice
from sluice.v1 import types_pb2

from sluice_server.services.cli.client import describe, usage_of


def test_usage_is_plain_numbers_and_lists_of_them_by_position() -> None:
    usage = types_pb2.Usage(prompt_tokens=4, drafted_tokens=3, drafted_tokens_by_position=[2, 1])
    found = json.loads(json.dumps(usage_of(usage)))
    assert (found["prompt_tokens"], found["drafted_tokens"]) == (4, 3)
    assert found["drafted_tokens_by_position"] == [2, 1]
    assert found["accepted_tokens_by_position"] == []


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("failed to connect to all addresses; last error: …", "no server answers at host:1; start one"),
        ("errors resolving host: [field:hostname lookup]", "--address: no host of the name in host:1 is known"),
        ("draining", "UNAVAILABLE: draining"),
    ],
)
def test_a_server_that_cannot_be_reached_is_one_line(message: str, said: str) -> None:
    assert describe(sluice.Unavailable(message), "host:1").startswith(said)
