"""The page that compares with peers: a row for each figure that was measured, goals that are missed are marked."""

import json
from pathlib import Path

from benchmarks.cpu.peers_report import page, plots

ABOUT = {"machine": {"cpu": "Some CPU", "cores": 2}}


def keep(folder: Path, name: str, **found: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"command": f"measure {name}", **ABOUT, **found}))


def rounds(**values: list[float]) -> dict[str, object]:
    return {**{name: sorted(each)[len(each) // 2] for name, each in values.items()}, "rounds": values}


def test_what_was_not_measured_has_no_row(tmp_path: Path) -> None:
    assert page(tmp_path).endswith("|---|---|---|---|---|---|\n\n")
    assert "those of its start" in page(tmp_path)


def test_rows_have_spread_ratio_goal_and_command(tmp_path: Path) -> None:
    own, peer = "sluice float32, HTTP", "vLLM float32, 2 threads, HTTP"
    keep(
        tmp_path,
        "cpu_open_load_61M",
        lengths="short",
        goodput={own: rounds(goodput=[9.0, 8.0, 7.5]), peer: rounds(goodput=[5.0, 4.0, 6.0])},
        goodput_over_peer={own: {"median": 1.5, "least": 1.2, "most": 2.0}},
        burst={own: rounds(late_for_s=[0.0, 0.4, 0.2]), peer: rounds(late_for_s=[3.0, 4.0, 9.0])},
    )
    text = page(tmp_path)
    assert "8.0 (7.5 to 9.0) | 5.0 (4.0 to 6.0) | 1.5 × (1.2 to 2.0) | ≥ 1.6 ×: **missed** |" in text
    assert "0.2 (0.0 to 0.4) | 4.0 (3.0 to 9.0) |  | ≤ 2 s | 1 |" in text and "1. `measure cpu_open_load_61M`" in text
    assert "2 cores of Some CPU" in text
    assert page(tmp_path, "Others computed.").replace("Others computed.\n\n", "") == text


def test_long_contexts_and_steps(tmp_path: Path) -> None:
    case = "decode, 1024 tokens, 8 rows"
    row = {"least": 1.0, "most": 9.0}
    keep(
        tmp_path,
        "cpu_long_context_61M",
        ms={
            one: {"int8": {"ms": 2.0, **row}, "llama.cpp q8_0": {"ms": 4.0, **row}}
            for one in (case, "shared, 9 tokens, 8 rows")
        },
        over_best_peer={case: {"int8": 0.5}, "shared, 9 tokens, 8 rows": {"int8": 0.9}},
        memory_over_best_peer={case: {"int8": 0.4}, "shared, 9 tokens, 8 rows": {"int8": 0.8}},
        int8_attention_over_bfloat16={"1024 tokens, 8 rows": 0.7},
    )
    steps = {"1": [2.0, 3.0, 4.0]}
    fast = {"step_ms": {"1": 3.0}, "step_ms_runs": steps, "prefill_tokens_per_s": 200, "prefill_runs": [200]}
    slow = {"step_ms": {"1": 6.0}, "step_ms_runs": steps, "prefill_tokens_per_s": 100, "prefill_runs": [100]}
    keep(tmp_path, "cpu_decode_61M_float32", contestants={"float32": fast, "vLLM float32": slow, "llama.cpp f32": slow})
    text = page(tmp_path)
    assert "2.0 (1.0 to 9.0) | llama.cpp q8_0 4.0 (1.0 to 9.0) | 0.50 × | ≤ 0.7 × |" in text
    assert "| 0.90 × | ≤ 0.7 ×: **missed** (torch's sum of as many bytes takes 0.80 ×) |" in text
    assert "int8 over bfloat16 |  |  | 0.70 × | ≤ 0.6 ×: **missed** |" in text
    assert "| 0.50 × |  | 1 |" in text and "2. `measure cpu_long_context_61M`" in text and "| 2.00 × |" in text


def test_a_closed_loop_has_goals_at_each_step_and_for_the_first_token_of_one_stream(tmp_path: Path) -> None:
    def row(rate: float, ttft: float) -> dict[str, float]:
        ends = {
            f"{key}_{end}": one for key, one in (("tokens_per_s", rate), ("ttft_ms", ttft)) for end in ("min", "max")
        }
        return {"tokens_per_s": rate, "ttft_ms": ttft, **ends}

    servers = {
        "sluice float32": {"1": row(200.0, 6.0), "32": row(1800.0, 100.0)},
        "sluice float32 --text-interval-ms 0": {"1": row(100.0, 9.0), "32": row(1400.0, 100.0)},
        "vLLM bfloat16, 1 thread": {"1": row(900.0, 2.0)},
        "vLLM float32, 2 threads": {"1": row(50.0, 2.0), "32": row(700.0, 100.0)},
        "vLLM float32, 1 thread": {"1": row(100.0, 10.0), "32": row(1000.0, 200.0)},
    }
    keep(tmp_path, "cpu_service_6.5M", servers=servers)
    lines = page(tmp_path).splitlines()
    prefix = "| tokens a second, 32 streams, 64 tokens in and out, 6.5M in float32"
    assert f"{prefix} | 1800 (1800 to 1800) | 1000 (1000 to 1000) | 1.80 × |  | 1 |" in lines
    assert (
        f"{prefix}, text at each step | 1400 (1400 to 1400) | 1000 (1000 to 1000) | 1.40 × | ≥ 1.5 ×: **missed** | 1 |"
        in lines
    )
    first = "| ms to the first token, p50, 1 streams, 6.5M in float32"
    assert f"{first} | 6.0 (6.0 to 6.0) | 10.0 (10.0 to 10.0) | 0.60 × | ≤ 0.5 ×: **missed** | 1 |" in lines
    assert f"{first}, text at each step | 9.0 (9.0 to 9.0) | 10.0 (10.0 to 10.0) | 0.90 × |  | 1 |" in lines


def test_prompts_are_compared_form_by_form(tmp_path: Path) -> None:
    def row(*runs: float) -> dict[str, object]:
        return {"prefill_tokens_per_s": sorted(runs)[len(runs) // 2], "prefill_runs": runs}

    rows = {"int8": row(380.0, 400.0, 500.0), "bfloat16": row(300.0), "vLLM bfloat16": row(200.0)}
    keep(tmp_path, "cpu_prefill_474M", contestants=rows)
    keep(
        tmp_path, "cpu_prefill_135M", contestants={"float32": row(200.0), "llama.cpp f32": row(100.0), "int4": row(1.0)}
    )
    text = page(tmp_path)
    assert "int8 | 400 (380 to 500) | vLLM bfloat16 200 (200 to 200) | 2.00 × | ≥ 2.2 ×: **missed** | 1 |" in text
    assert "bfloat16 | 300 (300 to 300) | vLLM bfloat16 200 (200 to 200) | 1.50 × | ≥ 1.4 × | 1 |" in text
    assert "float32 | 200 (200 to 200) | llama.cpp f32 100 (100 to 100) | 2.00 × | ≥ 2 × | 2 |" in text
    assert "int4" not in text  # which the peer was not measured in


def test_plots_of_what_was_measured(tmp_path: Path) -> None:
    assert list(plots(tmp_path)) == []
    row = {"ms": 2.0, "least": 1.0, "most": 3.0}
    steps = {
        f"decode, {context} tokens, {rows} rows": {"int8": row, "llama.cpp q8_0": row}
        for context in (64, 1024)
        for rows in (1, 8)
    }
    keep(tmp_path, "cpu_long_context_61M", ms={**steps, "prefill, 4096 tokens, 1 rows": {"int8": row}})
    keep(tmp_path, "cpu_open_load_61M", goodput={"vLLM": rounds(goodput=[5.0, 4.0]), "sluice": rounds(goodput=[5.0])})
    drawn = {name: text for name, _, text in plots(tmp_path)}
    assert set(drawn) == {"peers-open.svg", "peers-long.svg"}
    assert drawn["peers-long.svg"].count("<polyline") == 2 and "8 rows, cache in int8" in drawn["peers-long.svg"]
    assert "1 rows" not in drawn["peers-long.svg"] and drawn["peers-open.svg"].count("<polyline") == 2
