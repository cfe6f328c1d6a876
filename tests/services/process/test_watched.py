import logging
import threading
from concurrent.futures import ThreadPoolExecutor, wait
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


def test_two_threads_read_one_change_once(tmp_path: Path) -> None:
    file = tmp_path / "number"
    file.write_text("1")
    is_reading, may_read = threading.Event(), threading.Event()
    num_reads = 0

    def load() -> str:
        nonlocal num_reads
        num_reads += 1
        if num_reads > 1:
            is_reading.set()
            assert may_read.wait(60)
        return file.read_text()

    watched = WatchedFile((file,), load)
    file.write_text("22")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(watched.refresh)
        assert is_reading.wait(60)
        second = threads.submit(watched.refresh)
        assert not wait([second], timeout=0.05).done  # it waits for the value, rather than take the old one
        may_read.set()
        assert (first.result(60), second.result(60)) == (True, False)
    assert (watched.value, num_reads) == ("22", 2)
