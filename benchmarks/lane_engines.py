"""`sluice serve` whose engines compute nothing (`fake_engine`), in services of several models.

    FAKE_STEP_S=0.05 python -m benchmarks.lane_engines serve --models models.toml …

The supervisor starts this module again for each of its processes, which is an engine or what it would be anyway. What
stands before `serve` is ignored: so `tests.system.service.serve` can run it. No process is forked from a template,
which knows engines that compute only.
"""

import os
import sys

import typer

from sluice_server.services.cli.start import main
from sluice_server.services.config import ENV_PREFIX
from sluice_server.services.messages.processes import Role

if __name__ == "__main__":
    sys.argv = [sys.argv[0], *sys.argv[sys.argv.index("serve") :]]
    role = os.environ.get(f"{ENV_PREFIX}ROLE", "")
    if role == Role.ENGINE:
        from benchmarks import fake_engine

        sys.argv = sys.argv[:1]
        typer.run(fake_engine.main)
    else:
        from sluice_server.services.supervisor import serve

        serve.COMMAND = (sys.executable, "-m", "benchmarks.lane_engines")
        if not role:
            sys.argv.append("--no-process-templates")
        main()
