"""SGLang's load generator, which `python -m sglang.bench_serving` is, unchanged.

What its package and the server's packages do when they are imported is left out: that needs torch for CUDA and compiled
kernels, and the load generator takes an address and a constant from them.
"""

import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path

from transformers import AutoTokenizer

URL, MODEL, FOLDER = sys.argv[1].removesuffix("/v1"), *sys.argv[2:4]
NUM = 4
LENGTHS = ("--random-input-len", "24", "--random-output-len", "8", "--random-range-ratio", "1")


def found(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def stand_in(name: str, **values: object) -> None:
    """Makes a module of that name, or a package whose modules are those of its folder."""
    module = types.ModuleType(name)
    if not values:
        module.__path__ = [str(ROOT.joinpath(*name.split(".")[1:]))]
    vars(module).update(values)
    sys.modules[name] = module


ROOT = found("sglang")
for package in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.utils"):
    stand_in(package)
stand_in("sglang.srt.disaggregation.utils", FAKE_BOOTSTRAP_HOST="2.2.2.2")
stand_in("sglang.srt.utils.hf_transformers_utils", get_tokenizer=AutoTokenizer.from_pretrained)

from sglang.benchmark import serving  # noqa: E402 # behind the stand-ins

DOOR = ("--base-url", URL, "--model", MODEL, "--tokenizer", FOLDER, "--num-prompts", str(NUM))
answers = sys.stdout
for backend, kind in (("sglang-oai", "completions"), ("sglang-oai-chat", "chat")):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.jsonl"
        sys.argv = ["bench_serving", "--backend", backend, *DOOR, "--dataset-name", "random-ids", *LENGTHS]
        sys.argv += ["--output-file", str(path)]
        sys.stdout = sys.stderr  # what the program prints is no answer
        serving.cli_main()
        sys.stdout = answers
        result = json.loads(path.read_text().splitlines()[-1])
    assert result["completed"] == NUM, result
    assert result["total_output_tokens"] == 8 * NUM, result
    print(f"{kind}: {result['completed']} requests, no failure")
