"""The file of absent processes: written whole, read by this user's processes only."""

from pathlib import Path

from sluice_server.services.process import absences


def test_names_are_read_as_they_were_written_last(tmp_path: Path) -> None:
    assert absences.read(tmp_path) == frozenset()
    absences.write(tmp_path, ["engine-1", "engine-0"])
    assert absences.read(tmp_path) == {"engine-0", "engine-1"}
    absences.write(tmp_path, [])
    assert absences.read(tmp_path) == frozenset()
    assert [path.name for path in tmp_path.iterdir()] == [absences.FILE]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("engine-0")
    (tmp_path / absences.FILE).symlink_to(tmp_path / "other")
    assert absences.read(tmp_path) == frozenset()
    absences.write(tmp_path, ["engine-1"])
    assert (tmp_path / "other").read_text() == "engine-0"
