"""A constraint compiler for tests of stages without constraints."""

from pathlib import Path

from sluice_server.services.tokenizer.constraints import Constraints


def idle_constraints() -> Constraints:
    """Those of a model that has no tokenizer: nothing is started unless something is compiled."""
    return Constraints(Path("/nonexistent"), 400, (1,))
