"""What a gateway, a tokenizer and a detokenizer of most services never need, and do not import before they do."""

import subprocess
import sys

PROGRAM = """
import sys
from sluice_server.services.process.aside import import_needs
for role in ("gateway", "tokenizer", "detokenizer"):
    import_needs(role)
import sluice_server.services.gateway.process
unusual = {"engine.models.gguf.reader", "services.checkpoint.gguf.configuration", "services.checks.models", "torch"}
print(*sorted(name for name in unusual if {name, f"sluice_server.{name}"} & set(sys.modules)))
"""


def test_they_import_no_reader_of_gguf_files_no_checks_of_further_models_and_no_torch() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "\n"
