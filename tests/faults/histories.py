"""Plays the histories of a range of seeds one after the other, and prints those that fail.

    python -m tests.faults.histories 112:612 612:1112 7:8007:8

A failure does not end the run: what fails is found in one night, and played again by `tests.faults.pipeline`.
"""

import argparse
import sys
import time
import traceback

from tests.faults.pipeline import World

EVENTS = 4_000  # of each history, as in the test
EVERY = 25  # histories, after which a line says how far it is


def seeds_of(text: str) -> range:
    """Returns the seeds that `first:end` or `first:end:step` names."""
    parts = [int(part) for part in text.split(":")]
    if not 2 <= len(parts) <= 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not first:end or first:end:step")
    return range(*parts)


def is_right(seed: int) -> bool:
    """Plays a history; prints why it failed, if it did."""
    world = World(seed)
    try:
        world.run(EVENTS)
    except Exception:  # whatever it is, the other histories are played too
        traceback.print_exc()
        print(f"FAILED: python -m tests.faults.pipeline --seed {seed} --events {EVENTS}", flush=True)
        return False
    return True


def main() -> None:
    """Play the histories; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", type=seeds_of, nargs="+", help="first:end or first:end:step")
    seeds = [seed for one in parser.parse_args().seeds for seed in one]
    began, failed = time.monotonic(), list[int]()
    for num, seed in enumerate(seeds, 1):
        if not is_right(seed):
            failed.append(seed)
        if not num % EVERY or num == len(seeds):
            print(f"{num} of {len(seeds)}, {time.monotonic() - began:.0f} s, failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
