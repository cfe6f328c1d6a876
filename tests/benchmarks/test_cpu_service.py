"""The whole-service benchmark: its table, and resuming a stopped run."""

import json
from pathlib import Path

from benchmarks.cpu.plots import draw_service
from benchmarks.cpu.service import read, table


def test_ours_is_compared_with_the_best_peer_of_each_level(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    rows = [
        (run, name, level, {"tokens_per_s": rate + run, "ttft_ms": 5.0})
        for name, rates in (("sluice int8", (30, 60)), ("vLLM, 1 thread", (19, 9)), ("vLLM, 2 threads", (9, 29)))
        for level, rate in zip((1, 8), rates, strict=True)
        for run in (0, 1, 2)
    ]
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = table(read(kept), [1, 8])
    assert found["throughput_over_best_peer"] == {"sluice int8": {"1": 1.55, "8": 2.03}}
    assert "sluice int8" in draw_service(found)
    assert read(tmp_path / "none") == {}
