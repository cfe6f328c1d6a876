import logging
from pathlib import Path

import pytest

from sluice_server.services.config import bad_setting
from sluice_server.services.process.watched import WatchedFile


def test_a_change_is_read_and_a_bad_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "number"
    file.write_text("1")

    def load() -> int:
        try:
            return int(file.read_text())
        except (OSError, ValueError):
            raise bad_setting("number", f"{file} holds no number") from None

    watched = WatchedFile((file,), load)
    assert (watched.value, watched.refresh()) == (1, False)
    file.write_text("22")
    assert (watched.refresh(), watched.value) == (True, 22)
    with caplog.at_level(logging.ERROR):
        file.write_text("garbage")
        assert (watched.refresh(), watched.refresh(), watched.value) == (False, False, 22)
        file.unlink()
        assert (watched.refresh(), watched.value) == (False, 22)
    assert len(caplog.records) == 2
    file.write_text("333")
    assert (watched.refresh(), watched.value) == (True, 333)
