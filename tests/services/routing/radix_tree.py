"""Runs Dynamo's `RadixTree`, in an interpreter that has `ai-dynamo-runtime`: commands on stdin, answers on stdout.

A command is a line of JSON: ["store", engine, parent or null, [names]], ["remove", engine, [names]],
["forget", engine], or ["match", [names]], which is answered with the engines that hold leading blocks, and how many.
Names have 64 bits here.
Imports nothing of ours.
"""

import json
import sys


def main() -> None:
    """Carry out every command."""
    from dynamo._core import RadixTree

    tree = RadixTree()

    def apply(engine: int, data: object) -> None:
        tree.apply_event(engine, json.dumps({"event_id": 0, "dp_rank": 0, "data": data}).encode())

    for line in sys.stdin:
        match json.loads(line):
            case ["store", engine, parent, names]:
                blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
                apply(engine, {"stored": {"parent_hash": parent, "blocks": blocks}})
            case ["remove", engine, names]:
                apply(engine, {"removed": {"block_hashes": names}})
            case ["forget", engine]:
                tree.remove_worker(engine)
            case ["match", names]:
                print(json.dumps({engine: num for (engine, _), num in tree.find_matches(names).scores.items()}))


if __name__ == "__main__":
    main()
