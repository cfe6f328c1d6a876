"""The benchmark of GPU kernels without a GPU: every case small in the interpreter, resuming, and its plots."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import (
    gpu_attention,
    gpu_cases,
    gpu_clock,
    gpu_command,
    gpu_kernels,
    gpu_peers,
    gpu_plots,
    gpu_results,
    gpu_tune,
    machine,
)
from benchmarks.gpu_cases import Case, CaseDevice, Sizes, Work
from benchmarks.gpu_clock import Peaks
from benchmarks.gpu_command import Ground

SMALL = Sizes((1, 3), 300, (5,), 96, 4, 2, 32, 4, (1, 3), (128,), (1, 5), (4,), 2, 32, 16)
HERE = CaseDevice(torch.device("cpu"), torch.float16)  # bfloat16 is computed wrongly in the interpreter
PEAKS = Peaks(1e9, {2: 1e12, 1: 2e12})
CASES = gpu_kernels.all_cases(SMALL, gpu_kernels.PARTS, has_fp8=True)


def clock(call: object, *, is_recorded: bool = True) -> float:
    """A clock by which every call takes a millisecond."""
    return 1e-3


GROUND = Ground(HERE, clock, PEAKS, 1e9, {"gpu": "test"}, has_fp8=True)


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (machine, gpu_plots):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_case_computes_what_torch_does(case: Case) -> None:
    torch.manual_seed(0)
    row = gpu_kernels.measure(case, GROUND)
    assert (row["part"], row["us"], row["over_torch"]) == (case.part, 1e3, 1.0)
    work = case.make(HERE)
    assert row["of_roofline"] == pytest.approx(PEAKS.least_seconds(work.num_bytes, work.flops, work.size) / 1e-3)


def test_bytes_and_operations_are_those_of_the_shape() -> None:
    by_key = {case.key: case for case in gpu_kernels.all_cases(SMALL, gpu_kernels.PARTS, has_fp8=True)}
    assert by_key["norm: rms_norm, 5"].make(HERE).num_bytes == 2 * 96 * (2 * 5 + 1)
    assert by_key["silu: silu_mul, 5"].make(HERE).num_bytes == 3 * 5 * 96 * 2
    linear = by_key["linear: w8a16, 128 x 128, 3"].make(HERE)
    assert (linear.num_bytes, linear.flops) == (128 * 128 + 4 * 128 + 2 * 3 * 256, 2 * 3 * 128 * 128)
    assert by_key["sample: greedy, 3"].make(HERE).num_bytes == 3 * 300 * 4


def test_a_case_that_disagrees_gives_no_figure() -> None:
    wrong = Work(list, list, 1, lambda: (torch.ones(2), torch.tensor([1.0, float("nan")])))
    with pytest.raises(ValueError, match="differs from torch by nan"):
        gpu_kernels.measure(Case("norm", "x", 1, lambda at: wrong), GROUND)


def test_parts_are_chosen_and_fp8_only_where_there_is_some() -> None:
    def parts(names: list[str], *, has_fp8: bool) -> set[str]:
        return {case.group.split(",")[0] for case in gpu_kernels.all_cases(SMALL, names, has_fp8=has_fp8)}

    assert parts(["linear"], has_fp8=True) == {"w8a16", "w4a16", "w8a8", "fp8"}
    assert parts(["linear", "silu"], has_fp8=False) == {"w8a16", "w4a16", "w8a8", "silu_mul"}
    assert len(gpu_kernels.all_cases(Sizes(), ["linear"], has_fp8=True)) == 4 * 2 * 4


def test_it_goes_on_where_it_was(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def call(name: str) -> dict[str, object]:
        asked.append(name)
        if name == "b" and asked.count("b") == 1:
            raise RuntimeError("no luck")
        return {"us": 1.5}

    def run(gpu: str, *, is_fresh: bool = False) -> gpu_results.Results:
        kept = gpu_results.Results("x", "command", {"gpu": gpu}, is_fresh=is_fresh)
        kept.measure([(name, lambda name=name: call(name)) for name in "abc"])  # type: ignore[misc] # mypy sees no default
        return kept

    assert run("one").errors == {"b": "RuntimeError: no luck"}
    assert "[2/3] b: FAILED, RuntimeError: no luck" in capsys.readouterr().out
    assert list(json.loads((results / "x.json").read_text())["rows"]) == ["a", "c"]
    assert not run("one").errors and asked == ["a", "b", "c", "b"]
    assert "[2/3] b: us 1.5" in capsys.readouterr().out
    run("another")
    run("another", is_fresh=True)
    assert asked[4:] == ["a", "b", "c"] * 2


def test_plots_are_of_what_was_measured_at_every_size(results: Path) -> None:
    rows = {}
    for group, size, share in (("w8a16", 1, 0.5), ("w8a16", 64, 0.75), ("fp8", 1, 0.5)):
        case = {"part": "linear", "group": group, "size": size, "of_roofline": share, "torch_of_roofline": 0.25}
        rows[f"{group} {size}"] = case
    assert gpu_plots.draw("k", rows) == [results / "k_linear.svg"]
    drawn = (results / "k_linear.svg").read_text()
    assert "w8a16: % of the roofline" in drawn and "fp8" not in drawn
    assert drawn.count("<polyline") == 3


def test_attention_is_measured_at_every_place_of_its_plots(results: Path) -> None:
    """Without the measuring: which cases there are, and what a row says of times."""
    sizes = gpu_attention.SIZES
    keys = [key for key, _ in gpu_attention.todo(GROUND, sizes)]
    others = len(sizes.prefills) + len(sizes.cascades)
    assert len(keys) == len(set(keys)) == 3 * len(sizes.decodes) + others
    assert len({batch * length for batch, length in sizes.decodes}) == len(sizes.decodes)
    told = gpu_attention.shares(1e-3, 2e-3, {"sdpa_us": 4e3})
    assert told == {"of_roofline": 0.5, "torch_of_roofline": 0.25, "sdpa_us": 4e3}
    row = {"part": "decode", "group": "int8", "size": 1024, **gpu_attention.shares(1e-3, 2e-3, {})}
    gpu_plots.draw("gpu_attention", {"decode: int8, 1 x 1024": row})
    assert (results / "gpu_attention_decode.svg").read_text().count("<polyline") == 2  # no torch


def test_a_peer_that_fails_costs_its_own_figure_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that no CUDA graph can hold is launched."""
    calls: list[bool] = []

    def picky(call: object, *, is_recorded: bool = True) -> float:
        calls.append(is_recorded)
        if is_recorded:
            raise RuntimeError("no graph")
        return 2e-3

    def broken(problem: gpu_peers.Problem, ground: Ground) -> gpu_peers.Call:
        raise ImportError("not here")

    monkeypatch.setattr(gpu_peers, "PEERS", {"one": lambda *_: list, "two": broken})
    problem = gpu_peers.Problem(torch.zeros(1, 1, 1), 1, 1, 1, 1, 1)
    found = gpu_peers.figures(problem, dataclasses.replace(GROUND, clock=picky), 1e-3, 10**9)
    assert found == {
        "two_missing": "ImportError: not here",
        "one_us": 2e3,
        "one_tflop_s": 0.5,
        "best": "one",
        "over_best": 2.0,
    }
    assert calls == [True, False]


def test_what_there_is_no_time_for_is_left(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = gpu_results.Results("x", "command", {})
    assert gpu_command.Asked(GROUND, [], kept, 0.0).run([("a", lambda: {"us": 1})]) == 0
    assert kept.left == ["a"] and not kept.rows and "no time for: a" in capsys.readouterr().err


MAINS: dict[str, Callable[[list[str]], int]] = {
    "gpu_attention": gpu_attention.main,
    "gpu_kernels": gpu_kernels.main,
    "gpu_tune": gpu_tune.main,
}


@pytest.mark.long
@pytest.mark.parametrize("name", MAINS)
def test_a_dry_run_goes_all_the_way(name: str, tmp_path: Path) -> None:
    assert MAINS[name](["--dry-run", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    assert found["gpu"] == "none: a dry run" and len(found["rows"]) > 2


def test_the_roofline_is_the_slower_of_bytes_and_operations() -> None:
    assert PEAKS.least_seconds(2_000, 0, 2) == 2e-6
    assert PEAKS.least_seconds(1, 10**9, 2) == 1e-3 and PEAKS.least_seconds(1, 10**9, 1) == 5e-4
    assert gpu_clock.peaks_of("NVIDIA H200", 1.0).bandwidth == 4.8e12
    unknown = gpu_clock.peaks_of("something", 0.9e12)
    assert unknown.least_seconds(10**12, 10**18, 2) == pytest.approx(1.0)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, said in ((["--parts", "norm,magic"], "magic: there are sample"), ([], "no CUDA device here")):
        with pytest.raises(SystemExit):
            gpu_kernels.main(arguments)
        assert said in capsys.readouterr().err
    assert gpu_cases.disagreement(Work(list, list, 1, None)) == 0.0
