"""Exported names follow the current conventions of OpenTelemetry."""

import re
from pathlib import Path

from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes, rpc_attributes
from opentelemetry.semconv.schemas import Schemas

from sluice_server.services.telemetry import names

CONVENTIONS = (gen_ai_attributes, rpc_attributes, error_attributes)


def test_every_conventional_attribute_exists_and_is_not_deprecated() -> None:
    known = {value: name for module in CONVENTIONS for name, value in vars(module).items() if isinstance(value, str)}
    used = [value for value in vars(names).values() if isinstance(value, str) and value.split(".")[0] in known_roots()]
    assert len(used) > 20
    for name in used:
        assert name in known, name
    sources = "".join(Path(module.__file__ or "").read_text() for module in CONVENTIONS)
    for name in used:
        docs = re.search(rf'^{known[name]}: Final = "[^"]+"\n"""(.*?)"""', sources, re.S | re.M)
        assert docs is None or not re.search("Deprecated: (Replaced|Removed|Obsoleted)", docs[1]), name


def known_roots() -> set[str]:
    return {"gen_ai", "rpc", "error"}


def test_the_schema_is_the_newest_that_the_library_knows() -> None:
    assert list(Schemas)[-1].value == names.SCHEMA_URL


def test_no_conventional_name_is_spelt_elsewhere() -> None:
    services = Path(names.__file__).parents[1]
    spelt = re.compile(r'"(?:gen_ai|rpc)\.[a-z_.]+"')
    for path in services.rglob("*.py"):
        if path.parent.name != "telemetry":
            assert not spelt.search(path.read_text()), path
