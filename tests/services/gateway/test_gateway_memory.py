"""One heap for the threads of a gateway, counted by malloc itself in a process of its own."""

import platform
import subprocess
import sys

import pytest

COUNT = """
import ctypes, sys, tempfile, threading
from services.gateway.memory import share_one_heap

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
