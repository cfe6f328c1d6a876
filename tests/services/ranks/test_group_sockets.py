"""Rank 0 and another rank over real sockets, in two threads."""

import contextlib
import dataclasses
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import zmq

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import RankLost, ServiceError
from sluice_server.engine.kv_cache.moves import Move, MoveKind
from sluice_server.engine.kv_cache.table import BlockRun
from sluice_server.engine.parallel.messages import (
    FillSlot,
    Hello,
    Launch,
    Launched,
    MoveBlocks,
    Moved,
    Order,
    Place,
    RankEnded,
    RankReady,
    Refused,
    SaveBlocks,
    Saved,
)
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.parallel.worker import RankWorker
from sluice_server.engine.plan import StepPlan
from sluice_server.services.process.heartbeat import Heartbeat
from sluice_server.services.ranks import leader
from sluice_server.services.ranks import sockets as rank_sockets
from sluice_server.services.ranks.codec import ORDERS, REPORTS, MalformedMessage
from sluice_server.services.ranks.leader import RankGroup
from sluice_server.services.ranks.membership import hello_of
from sluice_server.services.ranks.process import RankProcess
from sluice_server.services.ranks.sockets import RankSockets, open_sockets, own_address
from sluice_server.services.ring.keys import make_keys

CONFIG = EngineConfig(dtype="float32", tensor_parallel_size=2)
PLAN = StepPlan(3, [1, 0], [1, 2], [5, 0], [7, 8, 9], [True, True], [], [], {1: 1}, {1: (-1,)}, {0: False})
EPOCH = 5


class Idle:
    """A worker that has no transfers with the disk."""

    is_moving = False

    def moved(self) -> list[tuple[Move, bool]]:
        return []


def hello(rank: int) -> Hello:
    return hello_of(CONFIG, rank, EPOCH, "1", "abc")


class Pair:
    """Rank 0, and rank 1 in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self.addresses = {"engine-0": f"ipc://{directory}/0", "worker-0-1": f"ipc://{directory}/1"}
        self.group = RankGroup(RankSockets(self.addresses, "engine-0", ["worker-0-1"]), hello(0), shape_of(CONFIG))
        self.sockets = RankSockets(self.addresses, "worker-0-1", ["engine-0"])
        self.rank = RankProcess(1, self.sockets, Heartbeat("", "worker-0-1"))
        self.errors: list[Exception] = []

    @contextlib.contextmanager
    def beside(self, work: Callable[[], None]) -> Iterator[None]:
        """Runs rank 1's work beside the block."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self.errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        yield
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as directory:  # short, as a socket's path is
        made = Pair(Path(directory))
        yield made
        made.sockets.close()
        made.group.close()


def join(pair: Pair) -> None:
    pair.rank.tell(hello(1))
    next(pair.rank.orders())


def joined(pair: Pair) -> None:
    with pair.beside(lambda: join(pair)):
        pair.group.gather()


def test_a_second_group_with_the_same_paths_is_refused(pair: Pair) -> None:
    """The first goes on; its paths are free once it has ended."""
    joined(pair)
    with pytest.raises(ServiceError, match=r"--rank-peers: another rank is at .*/0: stop its group"):
        open_sockets(pair.addresses, "engine-0", ["worker-0-1"])
    pair.rank.tell(Launched(1, 1))
    assert pair.group.launched(1) == [Launched(1, 1)]
    pair.group.close()
    open_sockets(pair.addresses, "engine-0", ["worker-0-1"]).close()


def test_the_end_of_a_launch_is_kept_until_it_is_awaited(pair: Pair) -> None:
    """A rank of an earlier stage is ahead, and rank 0 looks at the others between two steps."""
    joined(pair)
    for num in (1, 2):
        pair.rank.tell(Launched(1, num))
        while num not in pair.group._launched:
            pair.group.look()
    assert pair.group.launched(1) == [Launched(1, 1)]
    assert pair.group.launched(2) == [Launched(1, 2)]
    pair.rank.tell(Launched(1, 9))
    with pytest.raises(RankLost, match="rank 1 is at launch 9, rank 0 at 3"):
        pair.group.launched(3)


def test_the_last_word_of_a_rank_is_heard_before_its_end(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that refuses another one tells it why and ends: the end may be seen first."""
    monkeypatch.setattr(rank_sockets, "LAST_WORD_S", 20.0)
    joined(pair)
    pair.group.close()
    with zmq.Context() as context, context.socket(zmq.PUSH) as late:
        late.connect(pair.addresses["worker-0-1"])
        frame = EPOCH.to_bytes(rank_sockets.EPOCH_BYTES) + ORDERS.encode(Refused("of another size"))
        beside = threading.Timer(0.1, late.send, [frame])
        beside.start()
        with pytest.raises(ServiceError, match="of another size"):
            next(pair.rank.orders())
        beside.join()
    monkeypatch.setattr(rank_sockets, "LAST_WORD_S", 0.0)
    with pytest.raises(RankLost, match="engine-0 has ended, or its connection is lost"):
        next(pair.rank.orders())


def test_a_rank_that_listens_on_the_network_needs_a_key() -> None:
    addresses = {"engine-0": "tcp://127.0.0.1:1", "worker-0-1": "tcp://127.0.0.1:2"}
    with pytest.raises(ServiceError, match=r"--ring-keys: is needed for tcp://127\.0\.0\.1:1: TCP is always encrypted"):
        open_sockets(addresses, "worker-0-1", ["engine-0"])


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("no.such.host.invalid", "--rank-peers: no.such.host.invalid has no address here"),
        ("198.51.100.9", "--rank-peers: cannot listen on tcp://198.51.100.9:9: Cannot assign requested address"),
    ],
)
def test_a_rank_listens_on_an_address_of_its_host_alone(
    tmp_path: Path, host: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_sockets, "NAME_S", 0.0)
    addresses = {"engine-0": "tcp://127.0.0.1:1", "worker-0-1": f"tcp://{host}:9"}
    make_keys(tmp_path, addresses)
    with pytest.raises(ServiceError, match=text):
        open_sockets(addresses, "worker-0-1", ["engine-0"], str(tmp_path))
    assert own_address("tcp://localhost:9") in ("tcp://127.0.0.1:9", "tcp://[::1]:9")
    assert own_address("tcp://[::1]:9") == "tcp://[::1]:9" and own_address("ipc:///a") == "ipc:///a"


def test_orders_come_as_they_were_sent_and_launches_are_answered(pair: Pair) -> None:
    sent: list[Order] = [
        Place([2], [BlockRun(2, 0, [4, 5], 1)], [-1]),
        FillSlot(3, "a/b", b"digest"),
        MoveBlocks([Move(MoveKind.SAVE, 3, 1, b"name")]),
        Launch(1, PLAN, True, [(0, 2)]),
    ]
    got: list[Order] = []

    def work() -> None:
        join(pair)
        pair.rank.tell(RankReady(1, "layout", "revision"))
        orders = pair.rank.orders()
        got.extend(next(orders) for _ in sent)
        pair.rank.tell(Launched(1, 1, "", False, 0.5, 0.25))

    with pair.beside(work):
        pair.group.gather()
        pair.group.ready("layout")
        pair.group.check_revision("revision")
        for order in sent:
            pair.group.send(order)
        assert pair.group.launched(1) == [Launched(1, 1, "", False, 0.5, 0.25)]
    assert got == sent


def test_a_rank_writes_no_heartbeat_while_it_loads(pair: Pair, tmp_path: Path) -> None:
    """Loading may take longer than a process may be silent."""
    heart = Heartbeat(str(tmp_path), "worker-0-1")
    pair.rank = RankProcess(1, pair.sockets, heart)
    joined(pair)
    assert not any(path.stat().st_size for path in tmp_path.iterdir())
    pair.group.close()
    with pytest.raises(RankLost, match="engine-0 has ended"):
        pair.rank.compute(cast("RankWorker", Idle()))
    assert any(path.stat().st_size for path in tmp_path.iterdir())
    heart.close()


def test_a_rank_with_other_settings_is_refused_and_told_so(pair: Pair) -> None:
    other = hello_of(dataclasses.replace(CONFIG, block_size=16), 1, EPOCH, "1", "abc")
    text = "rank 1 has --block-size '16', and rank 0 '32'; start all ranks with the same files and settings"

    def work() -> None:
        pair.rank.tell(other)
        next(pair.rank.orders())

    with pair.beside(work), pytest.raises(ServiceError, match=text):
        pair.group.gather()
    assert [str(error) for error in pair.errors] == [text]


def test_a_rank_that_loaded_other_files_is_refused(pair: Pair) -> None:
    joined(pair)
    pair.rank.tell(RankReady(1, "layout", "revision"))
    pair.group.ready("layout")
    with pytest.raises(ServiceError, match="rank 1 has loaded another model, revision; rank 0 has other"):
        pair.group.check_revision("other")


def test_a_rank_that_does_not_come_is_named(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "START_S", 0.05)
    with pytest.raises(ServiceError, match="rank 1 did not come to join within"):
        pair.group.gather()


def test_the_end_of_a_rank_ends_rank_0(pair: Pair) -> None:
    joined(pair)
    pair.sockets.close()
    with pytest.raises(RankLost, match="worker-0-1 has ended, or its connection is lost"):
        pair.group.launched(1)


def test_what_moved_and_was_saved_reaches_rank_0(pair: Pair) -> None:
    joined(pair)
    move = Move(MoveKind.WRITE, 1, -1, b"name")
    pair.rank.tell(Moved(1, [(move, True)]))
    pair.rank.tell(Launched(1, 1))
    assert pair.group.launched(1) == [Launched(1, 1)]
    assert pair.group.moved() == [Moved(1, [(move, True)])] and pair.group.moved() == []
    pair.group.save([move], 1.0)
    assert next(pair.rank.orders()) == SaveBlocks([move], 1.0)
    pair.rank.tell(Saved(1))
    pair.group.saved(60.0)


def test_a_rank_that_does_not_save_is_not_waited_for_long(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    joined(pair)
    pair.group.saved(0.0)
    assert "rank 1 did not save its part of the cache" in caplog.text


def test_rank_0_sees_the_end_of_a_rank_between_two_steps(pair: Pair) -> None:
    joined(pair)
    pair.group.look()
    pair.sockets.close()

    def look_on() -> None:
        while True:
            pair.group.look()

    with pytest.raises(RankLost, match="worker-0-1 has ended, or its connection is lost"):
        look_on()


def test_the_reason_of_a_rank_that_ends_is_passed_on(pair: Pair) -> None:
    joined(pair)
    pair.rank.tell(RankEnded(1, "no memory"))
    with pytest.raises(RankLost, match="rank 1 has ended: no memory"):
        pair.group.launched(1)


def test_the_end_of_rank_0_ends_a_rank(pair: Pair) -> None:
    joined(pair)
    pair.group.close()
    with pytest.raises(RankLost, match="engine-0 has ended"):
        next(pair.rank.orders())


def test_a_rank_that_says_nothing_is_stuck(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "patience_s", lambda step_s: 0.05)
    joined(pair)
    with pytest.raises(RankLost, match=r"rank 1 has not said for 0.1 s how launch 1 ended: stuck"):
        pair.group.launched(1)


def test_a_rank_at_another_launch_is_out_of_step(pair: Pair) -> None:
    joined(pair)
    pair.rank.tell(Launched(1, 2))
    with pytest.raises(RankLost, match="rank 1 is at launch 2, rank 0 at 3"):
        pair.group.launched(3)


def test_what_is_left_of_an_earlier_start_is_not_heard(pair: Pair) -> None:
    joined(pair)
    pair.sockets.epoch = EPOCH - 1
    pair.rank.tell(RankEnded(1, "of before"))
    pair.sockets.epoch = EPOCH
    pair.rank.tell(Launched(1, 1))
    assert pair.group.launched(1) == [Launched(1, 1)]
    pair.group._sockets.epoch = EPOCH + 1
    pair.group.send(Place([], [], []))
    with pytest.raises(RankLost, match="rank 0 is at start 6 of the group, this rank at 5"):
        next(pair.rank.orders())


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x00", ORDERS.encode(Launch(1, PLAN, True, []))[:-3]])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        ORDERS.decode(data)


def test_reports_survive_their_encoding() -> None:
    for report in (hello(1), RankReady(1, "a", "b"), Launched(1, 2, "e", True), RankEnded(1, "x")):
        assert REPORTS.decode(REPORTS.encode(report)) == report
