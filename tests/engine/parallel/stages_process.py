"""A rank of another stage that is a process of its own: `python stages_process.py FD MEMBER STAGES`.

It does what the lines say that it reads: sends, computes without sending, or gives up.
"""

import sys

import torch

from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.stages_shared import SharedMemoryStages


def main() -> None:
    """Carries out lines."""
    file, member, num = map(int, sys.argv[1:4])
    stages = SharedMemoryStages(file, ParallelShape(pipeline_size=num).of_member(member))
    print("ready", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "send":
                stages.begin()
                stages.send(torch.arange(12.0).view(3, 4), lambda: None)
            case "compute":
                stages.note_progress()
            case "end":
                stages.end()
        print("done", flush=True)


if __name__ == "__main__":
    main()
