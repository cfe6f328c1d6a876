"""The engine's GPU benchmark without a GPU: the same functions on a tiny model and CPU tensors, and its arithmetic."""

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks import gpu_engine, gpu_mixed, gpu_peer, gpu_rig
from benchmarks.gpu_clock import Peaks
from benchmarks.gpu_engine import TINY
from benchmarks.gpu_rig import LLAMA_8B, Watched
from tests.engine.worker.host_device import HostDevice

CPU = torch.device("cpu")


def test_bytes_of_a_step_are_those_of_the_model() -> None:
    assert round(gpu_engine.step_bytes(LLAMA_8B, 0, 0) / 1e9, 1) == 15.0
    per_token = gpu_engine.step_bytes(LLAMA_8B, 1, 1) - gpu_engine.step_bytes(LLAMA_8B, 1, 0)
    assert per_token == 128 << 10
    fp8 = gpu_rig.Kept("fp8", torch.float8_e4m3fn)
    assert 2 * gpu_engine.step_bytes(LLAMA_8B, 3, 99, fp8) == gpu_engine.step_bytes(LLAMA_8B, 3, 99)


def test_a_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine, "STEPS", 8)
    row = gpu_engine.decode_step(TINY, 3, 5, CPU, gpu_engine.GpuLimits(Peaks(1e9, {2: 0.0, 1: 0.0}), 2e9))
    assert (row["rows"], row["context"]) == (3, 5) and row["host_ms"] == row["ms"]  # nothing is waited for
    assert float(str(row["of_specified"])) == pytest.approx(2 * float(str(row["of_copy"])))


def test_waiting_is_no_work_of_the_host() -> None:
    times = iter([1.0, 1.25, 5.0, 5.5])
    watched = Watched(HostDevice(), lambda: next(times))
    for _ in range(2):
        assert watched.download(torch.tensor([7])).wait().tolist() == [7]
    assert watched.waited_s == 0.75
    assert watched.upload(np.array([3])).tolist() == [3]


def test_busy_is_what_is_covered() -> None:
    assert gpu_engine.covered([(0.0, 1.0), (2.0, 4.0)]) == 0.75
    assert gpu_engine.covered([(2.0, 4.0), (0.0, 3.0), (1.0, 2.0)]) == 1.0
    with pytest.raises(ValueError, match="nothing ran"):
        gpu_engine.covered([])


def test_our_throughput_counts_every_token() -> None:
    row = gpu_engine.own_throughput(TINY, [(5, 3), (40, 9), (1, 2)], CPU)
    assert (row["requests"], row["tokens"]) == (3, 14)


@pytest.mark.long
def test_throughput_is_compared_over_the_same_requests() -> None:
    sizes = gpu_engine.sizes_of(4, (5, 12))
    ours = gpu_engine.own_throughput(TINY, sizes, CPU)
    theirs = gpu_engine.peer_throughput(TINY, sizes, CPU, {gpu_engine.OURS: ours})
    rates = [float(str(one["tokens_per_s"])) for one in (ours, theirs)]
    assert ours["tokens"] == theirs["tokens"] and theirs["ours_over_it"] == pytest.approx(rates[0] / rates[1])


class Stopped:
    """A manager of continuous batching that gives some results and ends."""

    def __init__(self, *results: object) -> None:
        self._results = list(results)

    def get_result(self, timeout: float) -> object:
        return self._results.pop(0) if self._results else None

    def is_running(self) -> bool:
        return False


@dataclasses.dataclass
class Result:
    request_id: str
    error: str | None = None
    generated_tokens: tuple[int, ...] = (1, 2)

    def is_finished(self) -> bool:
        return True


def test_a_peer_that_stops_gives_no_figure() -> None:
    assert gpu_peer.collect(Stopped(Result("a"), Result("b")), 2) == {"a": 2, "b": 2}
    with pytest.raises(RuntimeError, match="stopped after 1 of 2 requests"):
        gpu_peer.collect(Stopped(Result("a")), 2)
    with pytest.raises(RuntimeError, match="failed request a: no room"):
        gpu_peer.collect(Stopped(Result("a", "no room")), 2)


def test_the_peer_has_our_shape() -> None:
    model = gpu_peer.make_model(TINY, torch.float32, CPU)
    plan = gpu_rig.DeviceRandomWeights(torch.float32, CPU)
    assert model.lm_head.weight.shape == plan.get("lm_head.weight", (TINY.vocab_size, TINY.hidden_size)).shape
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (32, 32) and len(model.model.layers) == 1


@pytest.mark.parametrize(("arguments", "said"), [(["--parts", "9b"], "9b: there are 8b"), ([], "no CUDA device here")])
def test_without_a_gpu_it_says_so(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_engine.main(arguments)
    assert said in capsys.readouterr().err


def test_mixed_traffic_is_served_whole() -> None:
    """Constrained, scored and plain requests that arrive one by one; on a CPU nothing is recorded."""
    sizes = gpu_engine.sizes_of(7, (5, 12))
    row = gpu_mixed.mixed(TINY, 3, sizes, 32, CPU)
    assert (row["rows"], row["requests"], row["recorded"]) == (3, 7, 0.0) and float(str(row["of_plain"])) > 0


def test_of_five_requests_one_has_a_grammar_and_one_asks_for_scores() -> None:
    asked = [gpu_mixed.params_of(at, 4, is_mixed=True) for at in range(10)]
    assert [bool(one.grammar) for one in asked] == [True, False, False, False, False] * 2
    assert [one.logprobs >= 0 for one in asked] == [False, True, False, False, False] * 2
    assert not any(one.grammar or one.logprobs >= 0 for one in (gpu_mixed.params_of(0, 4, is_mixed=False),))
