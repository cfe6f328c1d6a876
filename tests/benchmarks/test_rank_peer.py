"""vLLM over ranks: rates of what it answers, and processes that are stopped outside of their turn."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import rank_peer

# Answers as the peer's worker does: steps of half a second, and a prompt of two.
WORKER = """
import json, sys
print(json.dumps({"about": ""}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    took = [2.0] if asked["what"] == "prefill" else [0.5] * asked["steps"]
    print(json.dumps({"seconds": took}), flush=True)
"""
SIZES = 4, 8, 512


def wait_for_stop(pid: int) -> None:
    assert os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT) is not None


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of a peer that is an interpreter, and of its worker."""
    (tmp_path / "vllm/bin").mkdir(parents=True)
    (tmp_path / "vllm/bin/python").symlink_to(sys.executable)
    (tmp_path / "vllm_worker.py").write_text(WORKER)
    monkeypatch.setattr(rank_peer, "VENVS", tmp_path)
    monkeypatch.setattr(rank_peer, "PEERS", tmp_path)
    return tmp_path


def test_rates_are_of_parts_and_the_peer_stands_between_turns(peers: Path) -> None:
    with rank_peer.opened(peers, "bfloat16", 2, peers / "log", SIZES) as peer:
        assert peer is not None
        pid = peer._contestant.process.pid
        wait_for_stop(pid)
        assert peer.decode(8) == [16.0, 16.0] and peer.prompt() == 256.0
        wait_for_stop(pid)
    assert peer._contestant.process.returncode == -9


def test_a_peer_that_cannot_start_is_said_and_left_out(peers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (peers / "vllm_worker.py").write_text("raise SystemExit(3)")
    with rank_peer.opened(peers, "float32", 2, peers / "log", SIZES) as peer:
        assert peer is None
    assert f"vLLM over 2 ended with status 3; see {peers / 'log'}" in capsys.readouterr().out
    with rank_peer.opened(peers, "int8", 2, peers / "log", SIZES) as peer:
        assert peer is None
    assert "vLLM has no int8: it is left out" in capsys.readouterr().out
