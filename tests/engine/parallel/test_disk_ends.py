"""A block is on disk if it is on every rank's."""

from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.parallel.disk_ends import DiskEnds

READ, WRITE = Move(MoveKind.READ, -1, 3, b"a"), Move(MoveKind.WRITE, 2, -1, b"b")


def test_an_end_is_told_once_every_rank_has_told_it() -> None:
    ends = DiskEnds(3)
    assert ends.note(0, [(READ, True), (WRITE, True)]) == []
    assert ends.note(2, [(WRITE, True)]) == []
    assert ends.note(1, [(WRITE, True), (READ, True)]) == [(WRITE, True)]
    assert ends.note(2, [(READ, True)]) == [(READ, True)]
    assert not ends._by_move


def test_what_failed_on_one_rank_has_failed() -> None:
    ends = DiskEnds(2)
    ends.note(1, [(READ, False)])
    assert ends.note(0, [(READ, True)]) == [(READ, False)]


def test_the_same_transfer_may_be_under_way_twice() -> None:
    ends = DiskEnds(2)
    ends.note(0, [(WRITE, True), (WRITE, False)])
    assert ends.note(1, [(WRITE, True)]) == [(WRITE, True)]
    assert ends.note(1, [(WRITE, True)]) == [(WRITE, False)]
    assert not ends._by_move
