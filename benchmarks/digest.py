"""Measures how long a start takes to hash a checkpoint: the first time, and with remembered digests.

    python -m benchmarks.digest --gigabytes 16

Shards are sparse, so that memory and hash are measured and no disk.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SHARDS = 4
ONCE = """
import sys, time
from pathlib import Path
from sluice_server.services.checkpoint.digests import Remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, ModelSource
start = time.perf_counter()
source = ModelSource(Path(sys.argv[1]), "m")
revision = CheckpointFiles(source, Remembered(Path(sys.argv[2])), with_weights=True).named().revision
print(time.perf_counter() - start, revision)
"""


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=int, default=16)
    gigabytes: int = parser.parse_args().gigabytes
    with tempfile.TemporaryDirectory() as name:
        model, memory = Path(name) / "model", Path(name) / "memory"
        model.mkdir()
        (model / "config.json").write_text("{}")
        for shard in range(SHARDS):
            with (model / f"model-{shard}.safetensors").open("wb") as file:
                file.truncate(gigabytes * 1_000_000_000 // SHARDS)
        command = [sys.executable, "-c", ONCE, str(model), str(memory)]
        took, revisions = zip(*(subprocess.check_output(command, text=True).split() for _ in range(3)), strict=True)
        assert len(set(revisions)) == 1
    cold_s, *warm_s = map(float, took)
    print(
        json.dumps(
            {
                "gigabytes": gigabytes,
                "first_s": round(cold_s, 2),
                "gigabytes_per_s": round(gigabytes / cold_s, 2),
                "remembered_s": round(max(warm_s), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
