"""Has memory backed by the system before its first use, on a thread that runs where nothing else wants a processor.

Needs our C++ kernels, whose thread never waits for Python's interpreter (kernels/cpu/backing.h), and Linux 6.4: before,
the first use of a page locked all of the process's memory map, for as long as that thread waits for a processor.
"""

import os
import re
import sys

from sluice_server.kernels.cpu import builds

FIRST_LINUX = (6, 4)  # whose page faults lock one mapping


def is_able(platform: str, release: str) -> bool:
    """Returns whether a system's page faults lock no more than one mapping. `release`: the kernel's, as "6.4.1-x"."""
    numbers = re.match(r"(\d+)\.(\d+)", release)
    return platform == "linux" and numbers is not None and (int(numbers[1]), int(numbers[2])) >= FIRST_LINUX


IS_ABLE = is_able(sys.platform, os.uname().release if hasattr(os, "uname") else "")


def back_later(address: int, size: int) -> bool:
    """Has `size` bytes at `address` backed whenever a processor is idle; their contents stay. They must stay mapped
    until then, or until `drop`. Returns False, and does nothing, where that cannot be or too many wait already."""
    return IS_ABLE and builds.MODULE is not None and builds.MODULE.backing_add(address, size)


def drop() -> None:
    """Forgets what waits. When it returns, nothing is being backed."""
    if builds.MODULE is not None:
        builds.MODULE.backing_drop()
