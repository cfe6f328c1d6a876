"""The cost of the block table without a GPU: all ways over tiny caches in the interpreter, with equal bits."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_block_table
from benchmarks.gpu_attention import DRY
from benchmarks.gpu_command import dry_ground


def test_each_way_is_measured_and_kept(tmp_path: Path) -> None:
    assert gpu_block_table.main(["--dry-run", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu_block_table.json").read_text())["rows"]
    assert len(rows) == len(gpu_block_table.PARTS) and all("scattered over one piece" in row for row in rows.values())


def test_ways_of_other_bits_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = gpu_block_table.ways

    def wrong(*given: object) -> dict[str, gpu_block_table.Way]:
        found = made(*given)  # type: ignore[arg-type] # passed on as they are
        cache, batch, scales = found["scattered"]
        return {**found, "scattered": (torch.zeros_like(cache), batch, scales)}

    monkeypatch.setattr(gpu_block_table, "ways", wrong)
    with pytest.raises(ValueError, match="bits depend"):
        gpu_block_table.compare(dry_ground(), DRY, (2, 64), "bfloat16")
