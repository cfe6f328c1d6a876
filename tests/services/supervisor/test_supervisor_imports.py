"""What a supervisor leaves to its processes, and to the one that reads its command line: it starts beside the first
template, and lives as long as the service."""

import subprocess
import sys

PROGRAM = """
import sys
import sluice_server.services.cli.start
import sluice_server.services.supervisor.serve
libraries = {"asyncio", "ssl", "grpc", "zmq", "numpy", "torch", "uvloop", "jinja2", "tomllib", "typer", "blake3"}
own = {"services.checkpoint.model_source", "services.checks.settings", "services.cli.options", "engine.models.config"}
print(*sorted((libraries | {f"sluice_server.{name}" for name in own}) & set(sys.modules)))
"""


def test_it_imports_no_event_loop_no_library_of_a_stage_and_nothing_that_only_a_start_needs() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "\n"
