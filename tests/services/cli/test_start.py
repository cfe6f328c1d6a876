"""The command line where standard files are closed: they lead nowhere, for its children too."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from sluice_server.services.cli.start import open_standard_files
open_standard_files()
print("printed"); print("complained", file=sys.stderr); sys.stdin.read()
with open(os.devnull) as other:
    os.write(int(sys.argv[1]), f"{other.fileno() > 2} {[os.get_inheritable(one) for one in range(3)]}".encode())
"""


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (1, 2), (0, 1, 2)])
def test_a_closed_standard_file_is_the_null_device(closed: tuple[int, ...]) -> None:
    read, write = os.pipe()
    shell = 'exec "$0" "$@"' + "".join(f" {one}>&-" for one in closed)
    command = ["sh", "-c", shell, sys.executable, "-c", SCRIPT, str(write)]
    ran = subprocess.run(command, pass_fds=[write], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    os.close(write)
    with open(read) as said:
        assert (ran.returncode, said.read()) == (0, "True [True, True, True]"), ran.stderr
    assert (b"printed" in ran.stdout, b"complained" in ran.stderr) == (1 not in closed, 2 not in closed)
