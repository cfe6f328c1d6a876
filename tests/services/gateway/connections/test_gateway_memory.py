"""The threads of a gateway share one malloc heap, counted by malloc itself in a process of its own."""

import platform
import subprocess
import sys

import pytest

from sluice_server.services.gateway.connections import memory

COUNT = """
import ctypes, sys, tempfile, threading
from sluice_server.services.gateway.connections.memory import share_one_heap

if sys.argv[1] == "shared":
    share_one_heap()
libc, together = ctypes.CDLL(None), threading.Barrier(4)
libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p

def take():
    together.wait()
    libc.malloc(1000)
    together.wait()  # a heap is given back with its thread

threads = [threading.Thread(target=take) for _ in range(4)]
for one in threads:
    one.start()
for one in threads:
    one.join()
with tempfile.NamedTemporaryFile() as told:
    file = ctypes.c_void_p(libc.fopen(told.name.encode(), b"w"))
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(told.read().count(b"<heap nr="))
"""


def num_heaps(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", COUNT, how], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have but one heap")
def test_threads_share_one_heap() -> None:
    assert num_heaps("own") > 1 == num_heaps("shared")


def test_memory_is_given_back_after_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(memory, "give_back", lambda: given.append(1))
    now_s, resident = [0.0], [100 << 20]
    spare = memory.MallocTrim(lambda: now_s[0], lambda: resident[0])

    def look(later_s: float, num_bytes: int) -> bool:
        now_s[0] += later_s
        resident[0] = num_bytes
        return spare.beat()

    assert not look(1.0, 900 << 20)  # too soon
    assert not look(memory.LOOK_EVERY_S, (100 << 20) + memory.GROWTH_BYTES - 1)
    assert look(memory.LOOK_EVERY_S, 200 << 20) and given == [1]
    assert not look(memory.LOOK_EVERY_S, 200 << 20)  # it was in use
    assert look(memory.LOOK_EVERY_S, 200 << 20) and given == [1, 1]  # and may be free by now
    assert not look(memory.MAX_EVERY_S, 50 << 20)
    assert look(memory.LOOK_EVERY_S, 90 << 20)
