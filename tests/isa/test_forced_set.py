"""One instruction set below that of most machines, without our own kernels, in a process that is held to it: so that a
machine sees two sets. `make test-isa` runs them all."""

from sluice_server.kernels.cpu import builds
from tests.isa.run import run
from tests.isa.sets import LOW, NONE, SETS, Forced

ROWS = "tests/kernels/test_ops.py::test_row_bits_do_not_depend_on_company"
COMPANY = ["tests/kernels/formats/test_row_blocks.py", f"{ROWS}[torch-2-704-2050]", f"{ROWS}[torch-3-34-37]"]


def test_rows_do_not_depend_on_company_under_another_set() -> None:
    is_green, said = run(LOW, COMPANY, "not long")
    assert is_green, said


def test_every_build_of_ours_is_a_set() -> None:
    own = {forced.kernels for forced in SETS if not forced.environment}
    assert own == {"", NONE, *builds.KNOWN}
    assert len({forced.name for forced in SETS}) == len(SETS)
    assert Forced(kernels="v9").why_not() == "not an instruction set of this machine"
