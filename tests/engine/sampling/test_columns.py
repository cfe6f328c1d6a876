"""Tables of sampling parameters are read column by column."""

from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling.columns import COLUMNS, FLOATS, INTS, pack, sampling_rows


def test_each_column_lies_contiguous_apart_from_its_table() -> None:
    """Kernels get the address of a column alone, and a slot's next sequence changes the table."""
    owners = [(SamplingParams(temperature=0.5, top_k=3, seed=7), 0), (SamplingParams(top_p=0.25, seed=9), 4)]
    floats, ints = pack(FLOATS, owners), pack(INTS, owners)
    rows = sampling_rows(floats, ints)
    floats[:], ints[:] = -1, -1
    for column in COLUMNS:
        found = getattr(rows, column.name)
        assert found.dtype == column.dtype and found.flags.c_contiguous, column.name
        expected = pack((column,), owners)[:, 0]
        assert found.tolist() == expected.tolist(), column.name
