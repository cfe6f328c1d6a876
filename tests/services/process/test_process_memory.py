"""The memory of a ring's processes."""

import os
import subprocess
import sys
from pathlib import Path

from sluice_server.services.process.process_memory import ring_memory


def process(proc: Path, pid: int, parent: int, title: bytes, kilobytes: int | None) -> None:
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "status").write_text(f"Name:\tx\nPPid:\t{parent}\nVmRSS:\t9 kB\n")
    (folder / "cmdline").write_bytes(title)
    if kilobytes is not None:
        (folder / "smaps_rollup").write_text(
            f"0-1 ---p 0 0:0 0 [rollup]\nRss: 99 kB\nPss:  {kilobytes} kB\nPss_Dirty: 1 kB\n"
        )


def test_the_children_of_the_supervisor_are_named_by_their_roles(tmp_path: Path) -> None:
    process(tmp_path, 11, 10, b"sluice: engine-0\0\0", 2048)
    process(tmp_path, 12, 10, b"sluice: gateway-0\0", 1024)
    process(tmp_path, 13, 11, b"sluice: other\0", 5)
    process(tmp_path, 14, 10, b"sluice: hidden-0\0", None)
    (tmp_path / "self").mkdir()
    assert ring_memory(10, tmp_path) == {"engine-0": 2 << 20, "gateway-0": 1 << 20}


def test_a_real_process_is_found() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        found = ring_memory(os.getpid())
        child.stdin.write(b"\n")
        child.stdin.close()
    assert any(num > 1 << 20 for num in found.values())
