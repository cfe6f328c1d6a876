"""The environment of a service in whose processes faults happen."""

import json
import os
from pathlib import Path

INJECTED = Path(__file__).parent / "injected"


def faults(**wanted: object) -> dict[str, str]:
    """The environment of a service with these faults; see `injected/sitecustomize.py`."""
    path = os.pathsep.join(filter(None, (str(INJECTED), os.environ.get("PYTHONPATH", ""))))
    return {"PYTHONPATH": path, "SLUICE_TEST_FAULTS": json.dumps(wanted)}
