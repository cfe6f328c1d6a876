from sluice_server.engine.parameters import PARAMETERS
from tools.sampling_parameters import PAGE, ROOT, page


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / PAGE).read_text() == page(), "run python -m tools.sampling_parameters"


def test_every_parameter_has_a_line() -> None:
    lines = [line for line in page().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == [row.name for row in PARAMETERS]
