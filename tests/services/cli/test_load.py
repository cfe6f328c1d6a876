"""The arithmetic of a load test."""

import pytest

from sluice_server.services.cli.load import RequestSample, arrival_times, report, summary


def test_percentiles_are_nearest_rank() -> None:
    figures = summary([float(value) for value in range(1, 101)])
    assert figures == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0}
    assert summary([]) == {}
    assert summary([3.0]) == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 3.0)


def test_report_of_known_samples() -> None:
    samples = [
        RequestSample(0.0, ((0.5, 1), (1.0, 2), (1.5, 2)), 2.0),
        RequestSample(1.0, ((1.25, 1),), 2.0),
        RequestSample(0.0, (), 4.0, "UNAVAILABLE", "the first"),
        RequestSample(0.0, (), 4.0, "UNAVAILABLE", "another"),
    ]
    figures = report(samples)
    assert figures["errors"] == {"UNAVAILABLE": 2}
    assert figures["first_errors"] == {"UNAVAILABLE": "the first"}
    assert figures["output_tokens"] == 6
    assert figures["output_tokens_per_s"] == 1.5
    assert figures["ttft_ms"] == {"mean": 375.0, "p50": 250.0, "p90": 500.0, "p99": 500.0, "max": 500.0}
    assert figures["tpot_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), 250.0)


def test_poisson_arrivals_have_their_rate() -> None:
    times = arrival_times(4000, rate=20.0, seed=1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200.0, rel=0.1)
    assert arrival_times(3, 20.0, 1) == times[:3]
