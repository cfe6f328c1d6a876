"""A step that takes longer than a probe's timeout is not taken for a dead process."""

from pathlib import Path

import pytest

from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe
from tests.system.service import generate, serve, spec

PROBE_TIMEOUT_S = 0.75


@pytest.mark.long
def test_a_long_first_prefill_is_not_a_loss(tmp_path: Path) -> None:
    """One step of 3,000 tokens through 24 layers takes several times the probe timeout."""
    make_checkpoint(tmp_path, Shape(layers=24, hidden=256, heads=8, head_dim=32, intermediate=512, context=8192))
    byte_level_bpe(tmp_path)
    options = ("--max-num-batched-tokens", "8192", "--probe-timeout-s", str(PROBE_TIMEOUT_S))
    with serve("--model", str(tmp_path), *options) as service, service.stub() as stub:
        output = generate(stub, spec([5] * 3000, 2))
    assert output.completion_tokens == 2
