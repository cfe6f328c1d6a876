"""A constraint compiler for tests of stages without constraints."""

from pathlib import Path

from sluice_server.services.tokenizer.constraints import Constraints


def idle_constraints() -> Constraints:
    """The constraints of a model without a tokenizer: no process is started unless something is compiled."""
    return Constraints(Path("/nonexistent"), 400, (1,))
