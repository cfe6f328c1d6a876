"""What connections write in one turn reaches their transports at its end, in order; never after an abort or an end."""

import asyncio

from sluice_server.services.edge.writing import LateTransport, Turn


class Wire(asyncio.Transport):
    """A transport that notes what is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_closing():
            raise RuntimeError("the handler is closed")  # as uvloop has it
        self.done.append(bytes(data))

    def is_closing(self) -> bool:
        return bool(self.done) and self.done[-1] in (b"closed", b"aborted")

    def close(self) -> None:
        self.done.append(b"closed")

    def abort(self) -> None:
        self.done.append(b"aborted")


async def test_a_turn_is_one_write_of_each_connection() -> None:
    turn, wires = Turn(), [Wire(), Wire()]
    first, second = (LateTransport(wire, turn) for wire in wires)
    first.write(b"a")
    second.write(b"x")
    first.write(bytearray(b"b"))
    assert not wires[0].done and not wires[1].done
    await asyncio.sleep(0)
    first.write(b"c")
    await asyncio.sleep(0)
    assert [wire.done for wire in wires] == [[b"ab", b"c"], [b"x"]]


async def test_the_end_of_a_connection_waits_for_what_was_written_and_an_abort_does_not() -> None:
    turn, wires = Turn(), [Wire(), Wire()]
    first, second = (LateTransport(wire, turn) for wire in wires)
    for one in (first, second):
        one.write(b"a")
    first.close()
    second.abort()
    await asyncio.sleep(0)
    assert [wire.done for wire in wires] == [[b"a", b"closed"], [b"aborted"]]


async def test_a_client_that_goes_away_within_a_turn_takes_nothing_from_the_others() -> None:
    turn, wires = Turn(), [Wire(), Wire()]
    first, second = (LateTransport(wire, turn) for wire in wires)
    for one in (first, second):
        one.write(b"a")
    wires[0].close()
    await asyncio.sleep(0)
    assert [wire.done for wire in wires] == [[b"closed"], [b"a"]]
    first.close()
