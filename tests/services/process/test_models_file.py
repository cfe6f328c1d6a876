"""The file of `--models`: what it says, and what is refused in it. The table that the supervisor writes."""

from pathlib import Path

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import ServiceConfig, parse_peers
from sluice_server.services.process.lane_ring import lane_of, lane_settings
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, read_table, write_table
from sluice_server.services.process.models_file import parse_models, parsed_option, read_models
from sluice_server.services.supervisor.plan import plan_lane

GOOD = """
[models.a]
source = "/a"
alias = "chat"
pinned = true
[models.a.settings]
kv-cache-tokens = 64
priority-ageing-s = 3
[models."org/b"]
load = false
"""


def test_a_file_names_models_their_settings_and_the_default() -> None:
    file = parse_models(GOOD)
    assert [*file.models] == ["a", "org/b"] and file.default == "chat"
    first, second = file.models.values()
    assert (first.source, first.alias, first.pinned, first.load) == ("/a", "chat", True, True)
    assert first.options == {"kv_cache_tokens": 64, "priority_ageing_s": 3.0}
    assert (second.source, second.load) == ("org/b", False)
    assert parse_models('default = "a"\n' + GOOD).default == "a"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "lists no model"),
        ("x = 1", "has x; it takes default"),
        ("models = 3", "lists no model"),
        ("[models.a]\n[models.a]", "is no TOML"),
        ("models.a = 1", "a is no table"),
        ("[models.a]\nsauce = 'x'", "a has sauce; it takes source"),
        ("[models.a]\npinned = 1", "pinned is 1, and not true or false"),
        ("[models.'a:b']", "is no name of a model"),
        ("[models.'']", "is no name of a model"),
        ("[models.a]\nload = false", "none would be served"),
        ("default = 'x'\n[models.a]", "default 'x' is neither"),
        ("default = 'b'\n[models.a]\n[models.b]\nload = false", "default 'b' is neither"),
        ("[models.a]\nalias = 'b'\n[models.b]", "alias 'b' is the id of a model"),
        ("[models.a]\nalias = 'c'\n[models.b]\nalias = 'c'", "a and b have one alias"),
        ("[models.a.settings]\nlisten = 'x'", "a: --listen: is no setting that a model has of its own"),
        ("[models.a.settings]\nkv-cache-token = 1", "did you mean 'kv-cache-tokens'"),
        ("[models.a.settings]\nkv-cache-tokens = 'x'", "--kv-cache-tokens: 'x' is not a whole number"),
        ("\n".join(f"[models.m{at}]" for at in range(65)), "lists 65 models; at most 64"),
    ],
)
def test_what_is_wrong_is_said(text: str, why: str) -> None:
    with pytest.raises(ServiceError, match=why) as refused:
        parse_models(text)
    assert refused.value.message.startswith("--models: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    for data, why in (
        (None, "No such file"),
        (b"\xff", "no UTF-8"),
        (b"x = 1", "has x"),
        (bytes(2 << 20), "more than"),
    ):
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ServiceError, match=why) as refused:
            read_models(path)
        assert str(path) in refused.value.message


def test_settings_are_read_from_text() -> None:
    found = dict(
        parsed_option(name, text)
        for name, text in (
            ("max-num-seqs", "8"),
            ("priority-ageing-s", "2"),
            ("prefix-caching", "false"),
            ("dtype", "bfloat16"),
        )
    )
    assert found == {
        **{"max_num_seqs": 8, "priority_ageing_s": 2.0, "prefix_caching": False},
        **{"dtype": "bfloat16"},
    }
    for name, text, why in (
        ("max-num-seqs", "x", "^--max-num-seqs: 'x' is not a whole number"),
        ("max-num-seqs", "2.5", "'2.5' is not a whole number"),
        ("priority-ageing-s", "soon", "^--priority-ageing-s: 'soon' is not a number"),
        ("prefix-caching", "yes", "^--prefix-caching: 'yes' is not true or false"),
        ("listen", "x", "^--listen: is no setting that a model has of its own$"),
    ):
        with pytest.raises(ServiceError, match=why):
            parsed_option(name, text)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    entry = LaneEntry("a", "/a", options={"dtype": "x", "max_num_seqs": 3}, state=LaneState.FAILED, why="é")
    table = ModelTable({"m3": entry}, "chat", {"chat": {"a": 2}}, {"m1": "why"})
    write_table(tmp_path, table)
    assert read_table(tmp_path) == table
    (tmp_path / "models.json").write_text("{")
    with pytest.raises(ServiceError, match="cannot be read"):
        read_table(tmp_path)


def test_a_lane_has_names_addresses_ports_and_settings_of_its_own(tmp_path: Path) -> None:
    service = ServiceConfig(models="f", gateways=2, metrics_port=9000)
    entry = LaneEntry("b", "/b", "v1", {"engines": 2, "max_num_seqs": 3, "chat_template": "t"})
    engine, lane = lane_settings(EngineConfig(), service, tmp_path, "m2", entry)
    assert (engine.max_num_seqs, lane.model, lane.revision, lane.served_model_name) == (3, "/b", "v1", "b")
    assert (lane.chat_template, lane.engines_file, lane.models) == ("t", "", "")
    assert parse_peers("gateway", lane.gateway_peers) == {
        f"gateway-{at}": f"ipc://{tmp_path}/m2-gateway-{at}" for at in range(2)
    }
    assert [*parse_peers("engine", lane.engine_peers)] == ["m2-engine-0", "m2-engine-1"]
    children = plan_lane(EngineConfig(threads=1), service, tmp_path, "m2", entry)
    assert [one.process_id for one in children] == [
        *("m2-engine-0", "m2-engine-1", "m2-tokenizer-0", "m2-detokenizer-0")
    ]
    assert {one.lane for one in children} == {"m2"}
    assert [one.environment["SLUICE_METRICS_PORT"] for one in children] == ["9300", "9301", "9302", "9303"]
    assert [lane_of(name) for name in ("engine-0", "m2-engine-0", "worker-m12-engine-0-1", "worker-0-1")] == [
        *("m0", "m2", "m12", "m0")
    ]
