"""What the block table costs on CPUs: layers that no cache of the processor keeps, and equal bits of all ways."""

import argparse

import pytest
import torch

from benchmarks.cpu import block_table
from sluice_server.kernels.cpu import builds

OPTIONS = argparse.Namespace(heads=4, kv_heads=2, dim=16, rows=2, runs=2, clock="wall")


def test_layers_exceed_the_caches_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    first = block_table.in_order(OPTIONS, torch.float32, 64)
    size = first[0].numel() * 4
    for uncached, num in ((3 * size, 3), (3 * size + 1, 4), (1, 1)):
        monkeypatch.setattr(block_table, "UNCACHED", uncached)
        layers = block_table.layers_of(first)
        assert len(layers) == num and len({cache.data_ptr() for cache, _ in layers}) == num
        assert all(torch.equal(cache, first[0]) for cache, _ in layers)


@pytest.mark.skipif(not builds.is_available(), reason="needs the C++ kernels")
def test_each_way_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_table, "UNCACHED", 1)
    assert set(block_table.compare(OPTIONS, "float32", 64)) == {"in order", "scattered", "one piece"}
