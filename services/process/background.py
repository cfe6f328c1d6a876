"""Lowers the priority of what must not delay stages and steps: it encodes long texts, tries out and compiles grammars.

They get all of an idle processor, and a tenth of a busy one. Linux shares processors between control groups
first, and in none of these between sessions (autogroup, sched(7)); niceness counts only within one. So such a process
needs a session of its own, which is lowered too: in that of a stage, its time would be charged to the stage.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sluice_server.engine.worker.host.cores import Cores, find_cores

NICENESS = 10  # a tenth of the share of normal priority: what has it is not starved
AUTOGROUP = Path("/proc/self/autogroup")
TRIES, AGAIN_S = 20, 0.12  # of all unprivileged processes together, Linux takes ten writes of AUTOGROUP a second


def num_compilers(cores: Cores | None = None) -> int:
    """Returns how many threads, or child processes, of a process compile grammars: one for two cores, at most two.

    Two, so that one slow grammar does not delay the next; one where two would keep every core busy, and steps waiting.
    """
    usable = (cores or find_cores()).usable
    return 2 if usable >= 4 else 1


def compiling_threads() -> ThreadPoolExecutor:
    """Creates the threads on which an engine compiles grammars: beside steps, and at a lower priority than these."""
    return ThreadPoolExecutor(num_compilers(), thread_name_prefix="grammar", initializer=_lower_thread)


def lower_process() -> None:
    """Lowers the priority of this process: of this thread, those that it starts later, and its session if it leads
    one."""
    _lower_thread()
    if os.getsid(0) == os.getpid():
        _lower_session()


def _lower_thread() -> None:
    os.nice(NICENESS)  # on Linux, of the calling thread only


def _lower_session() -> None:
    for _ in range(TRIES):
        try:
            AUTOGROUP.write_text(str(NICENESS))
        except BlockingIOError:
            time.sleep(AGAIN_S)
        except OSError:  # not Linux, or without autogroups
            return
        else:
            return
