"""Offloaded weights on a GPU, measured without one: every share of a tiny model's layers, by the file of a CPU."""

import json
from pathlib import Path

from benchmarks import gpu_offload


def test_each_share_is_measured_with_equal_tokens(tmp_path: Path) -> None:
    assert gpu_offload.main(["--dry-run", "--parts", "int8", "--out", str(tmp_path)]) == 0
    row = json.loads((tmp_path / "gpu_offload.json").read_text())["rows"]["int8"]
    assert row["tokens are equal"] is True
    assert 0 == row["0 layers, MB"] < row["4 layers, MB"] < row["8 layers, MB"] < row["16 layers, MB"]
