"""Where the suite's table goes, and what it says."""

from xml.etree import ElementTree

import pytest

from tests.conformance.report import README, placed, read, table

CASES = """<x>
<testcase name="test_unary[python]"/>
<testcase name="test_unary[go]"><failure/></testcase>
<testcase name="test_deadline[python-stream]"/>
<testcase name="test_deadline[python-converse]"><failure/></testcase>
<testcase name="test_deadline[java]"><skipped message="no javac"/></testcase>
</x>"""


def test_a_case_of_several_calls_holds_when_all_do() -> None:
    cells, reasons = read(ElementTree.fromstring(CASES).iter("testcase"))
    assert cells["unary", "python"] == "yes" and cells["unary", "go"] == "NO"
    assert cells["deadline", "python"] == "NO" and cells["deadline", "java"] == "-"
    assert reasons == {"java": "no javac"}
    assert "java: no javac." in table(cells, reasons)


def test_the_readme_has_one_place_for_it() -> None:
    page = README.read_text()
    written = placed(page, "\nthe table\n\n")
    assert "\nthe table\n" in written and written.count("<!--") == page.count("<!--")
    assert placed(written, "\nthe table\n\n") == written
    with pytest.raises(ValueError, match="0 places"):
        placed("a page without", "x")
