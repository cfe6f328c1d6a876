"""The file of engines: what it may hold, what is refused by name, and that a bad change changes nothing."""

from pathlib import Path

import pytest

from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.engine_table import EngineEntry, engines_of, parse_table, write_table

TWO = {"engine-0": EngineEntry("ipc:///run/a b/engine-0"), "e.1": EngineEntry("tcp://10.0.0.8:7003", draining=True)}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_table(tmp_path / "engines.toml", TWO)
    config = ServiceConfig(engines_file=str(tmp_path / "engines.toml"), ring_keys="keys")
    assert engines_of(config).value == TWO


def one(name: str = "e0", **fields: str) -> str:
    return "\n".join([f"[engines.{name}]", *(f"{field} = {value}" for field, value in fields.items())])


ADDRESS = '"ipc:///run/e"'
BAD = [
    ("not toml", "is no TOML"),
    (one(address=ADDRESS) + "\n" + one(address=ADDRESS), "is no TOML"),  # two with one id
    ("", "lists no engine"),
    ("engines = 3", "lists no engine"),
    ("[engines]", "lists no engine"),
    ("[engine.e0]\naddress = 'ipc:///a'", "has engine; it takes"),
    (one('"a b"', address=ADDRESS), "'a b' is no id"),
    ("[engines]\ne0 = 1", "e0 is no table"),
    (one(address="7"), "e0: address is 7, and not of type str"),
    (one(address=ADDRESS, draining='"yes"'), "e0: draining is 'yes', and not of type bool"),
    (one(address=ADDRESS, weight="1"), "e0 has weight; it takes address, draining"),
    (one(), "address '' is not tcp://"),
    (one(address='"http://x"'), "address 'http://x' is not tcp://"),
    (one(address='"tcp://h:1"'), "needs --ring-keys"),
    (one("a", address=ADDRESS) + "\n" + one("b", address=ADDRESS), "a and b have one address"),
    (one(address=ADDRESS, draining="true"), "every engine is draining"),
    ("\n".join(one(f"e{at}", address=f'"ipc:///{at}"') for at in range(17)), "lists 17 engines; at most 16"),
]


@pytest.mark.parametrize(("text", "why"), BAD, ids=[why for _, why in BAD])
def test_what_it_may_not_hold_is_refused_by_name(text: str, why: str) -> None:
    with pytest.raises(ServiceError) as refused:
        parse_table(text, has_keys=False)
    assert refused.value.message.startswith("--engines-file: ") and why in refused.value.message


def test_a_bad_change_leaves_the_engines_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    write_table(path, TWO)
    watched = engines_of(ServiceConfig(engines_file=str(path), ring_keys="keys"))
    path.write_text(one(address='"nowhere"'))
    assert (watched.refresh(), watched.value) == (False, TWO)
    path.unlink()
    assert (watched.refresh(), watched.value) == (False, TWO)
    write_table(path, {"e.1": TWO["engine-0"]})
    assert (watched.refresh(), watched.value) == (True, {"e.1": TWO["engine-0"]})


def test_a_file_that_cannot_be_read_at_the_start_is_named(tmp_path: Path) -> None:
    for data, why in [
        (None, "No such file"),
        (b"\xff", "is no UTF-8"),
        (b"#" * 70_000, "has more than 65536 bytes"),
        (b"x =", "is no TOML"),
    ]:
        if data is not None:
            (tmp_path / "e.toml").write_bytes(data)
        with pytest.raises(ServiceError, match=f"--engines-file: .*e.toml.*{why}"):
            engines_of(ServiceConfig(engines_file=str(tmp_path / "e.toml")))


def test_peers_and_a_file_exclude_each_other() -> None:
    peers = "e0=ipc:///a,e1=ipc:///b"
    watched = engines_of(ServiceConfig(engine_peers=peers))
    assert watched.value == {"e0": EngineEntry("ipc:///a"), "e1": EngineEntry("ipc:///b")} and not watched.refresh()
    with pytest.raises(ServiceError, match="exclude each other"):
        engines_of(ServiceConfig(engine_peers=peers, engines_file="/e.toml"))
