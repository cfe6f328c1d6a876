"""Lowers the priority of processes that must not delay stages and steps: they encode long texts and try out grammars.

They get all of an idle processor, and a tenth of a busy one. Linux shares processors between control groups
first, and in none of these between sessions (autogroup, sched(7)); niceness counts only within one. So such a process
needs a session of its own, which is lowered too: in that of a stage, its time would be charged to the stage.
"""

import os
import time
from pathlib import Path

NICENESS = 10  # a tenth of the share of normal priority: what has it is not starved
AUTOGROUP = Path("/proc/self/autogroup")
TRIES, AGAIN_S = 20, 0.12  # of all unprivileged processes together, Linux takes ten writes of AUTOGROUP a second


def lower_process() -> None:
    """Lowers the priority of this process: of this thread, those that it starts later, and its session if it leads
    one."""
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid():
        _lower_session()


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
