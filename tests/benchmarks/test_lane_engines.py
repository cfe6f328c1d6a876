"""The service of several models whose engines compute nothing: its tokens are made up."""

import sys

from benchmarks.fake_engine import FIRST_ID
from tests.system.service import generate, serve, spec

WITHIN = (sys.executable, "-m", "benchmarks.lane_engines")


def test_engines_make_tokens_up_from_where_each_step_begins() -> None:
    prompt = [400, 500, 600]
    paced = {"FAKE_STEP_S": "0.001"}
    with serve("--kv-cache-tokens", "4096", within=WITHIN, environment=paced) as service, service.stub() as stub:
        made = [one.id for one in generate(stub, spec(prompt, 4)).tokens]
    assert made == [FIRST_ID + start for start in (0, 3, 4, 5)]
