"""The version is the same wherever it is stated, and one command writes it everywhere."""

import shutil
from pathlib import Path

from tools.version import PLACES, REQUIREMENT, ROOT, versions, write


def test_all_places_state_the_same_version() -> None:
    found = versions(ROOT)
    assert all(found.values()), found
    assert len(set().union(*found.values())) == 1, found


def test_the_server_and_every_client_state_one() -> None:
    found = versions(ROOT)
    stating = {name.split("/")[1] for name in found if name.startswith("clients/")}
    assert stating == {path.name for path in (ROOT / "clients").iterdir()} and "sluice_server/version.py" in found
    assert len(set().union(*(found[name] for name in found if name.startswith(("clients/", "sluice_server/"))))) == 1


def test_it_is_written_everywhere_and_nothing_else_changes(tmp_path: Path) -> None:
    for name in (*PLACES, REQUIREMENT[0]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (old,) = set().union(*versions(ROOT).values())
    write(tmp_path, "9.8.7")
    assert set().union(*versions(tmp_path).values()) == {"9.8.7"}
    for name in (*PLACES, REQUIREMENT[0]):
        assert (tmp_path / name).read_text() != (ROOT / name).read_text()
    write(tmp_path, old)
    for name in (*PLACES, REQUIREMENT[0]):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
