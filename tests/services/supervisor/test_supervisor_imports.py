"""What a supervisor leaves to its processes: it starts beside the first template, and lives as long as the service."""

import subprocess
import sys

PROGRAM = """
import sys
from sluice_server.services.cli.app import alone
alone("serve")
import sluice_server.services.supervisor.serve
print(*sorted({"asyncio", "ssl", "grpc", "zmq", "numpy", "torch", "uvloop", "jinja2", "tomllib"} & set(sys.modules)))
"""


def test_it_imports_no_event_loop_and_no_library_of_a_stage() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "\n"
