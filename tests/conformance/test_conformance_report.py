"""The page and the content of the suite's table."""

from xml.etree import ElementTree

import pytest

from tests.conformance.report import PAGE, placed, read, table

CASES = """<x>
<testcase classname="tests.conformance.test_conformance" name="test_unary[python]"/>
<testcase classname="tests.conformance.test_conformance" name="test_unary[go]"><failure/></testcase>
<testcase classname="tests.conformance.test_conformance" name="test_deadline[python-stream]"/>
<testcase classname="tests.conformance.test_conformance" name="test_deadline[python-converse]"><failure/></testcase>
<testcase classname="tests.conformance.test_conformance" name="test_deadline[java]"><skipped message="none"/></testcase>
<testcase classname="tests.conformance.test_generated_stubs" name="test_stubs[go]"/>
</x>"""


def test_a_case_of_several_calls_holds_when_all_do() -> None:
    cells, reasons = read(ElementTree.fromstring(CASES).iter("testcase"))
    assert cells["unary", "python"] == "yes" and cells["unary", "go"] == "NO"
    assert cells["deadline", "python"] == "NO" and cells["deadline", "java"] == "-"
    assert reasons == {"java": "none"} and ("stubs", "go") not in cells
    assert "java: none." in table(cells, reasons)


def test_the_page_has_one_place_for_it() -> None:
    page = PAGE.read_text()
    written = placed(page, "\nthe table\n\n")
    assert "\nthe table\n" in written and written.count("<!--") == page.count("<!--")
    assert placed(written, "\nthe table\n\n") == written
    with pytest.raises(ValueError, match="0 places"):
        placed("a page without", "x")
