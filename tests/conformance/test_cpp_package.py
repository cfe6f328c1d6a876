"""The installed C++ client: CMake finds it, and every example of its page runs."""

import re
import shutil
from pathlib import Path

import pytest

from tests.conformance.commands import run
from tests.conformance.sdks import CLIENTS, ROOT, SDKS
from tests.conformance.test_conformance import num_open
from tests.system.service import Service, wait_until

FOLDER = CLIENTS / "cpp"
EXAMPLES = re.findall(r"```cpp\n(.*?)```", (FOLDER / "README.md").read_text(), re.S)
CONSUMER = """
cmake_minimum_required(VERSION 3.16)
project(consumer CXX)
find_package(sluice 0.1 REQUIRED)
file(GLOB sources *.cc)
foreach(source IN LISTS sources)
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE sluice::sluice)
endforeach()
"""


@pytest.mark.long
def test_the_examples_run_against_the_installed_package(tmp_path: Path, service: Service) -> None:
    (sdk,) = (one for one in SDKS if one.name == "cpp")
    if reason := sdk.build():
        pytest.skip(reason)
    prefix, consumer = tmp_path / "prefix", tmp_path / "consumer"
    run("cmake", "--install", str(FOLDER / "build"), "--prefix", str(prefix))
    installed = [path for path in prefix.rglob("*") if path.is_file()]
    assert {"client.h", "types.pb.h", "sluiceConfig.cmake"} <= {path.name for path in installed}
    for path in installed:
        assert path.suffix not in (".h", ".cmake") or str(ROOT) not in path.read_text()
    consumer.mkdir()
    (consumer / "CMakeLists.txt").write_text(CONSUMER)
    assert len(EXAMPLES) >= 3
    for number, example in enumerate(EXAMPLES):
        code = example.replace("127.0.0.1:50051", service.address)
        (consumer / f"example{number}.cc").write_text(code)
    shutil.copy(Path(__file__).with_name("cpp_habits.cc"), consumer)
    build = str(tmp_path / "build")
    run("cmake", "-S", str(consumer), "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-Wall -Werror")
    run("nice", "-n", "15", "cmake", "--build", build, "--parallel", "2")
    told = [run(f"{build}/example{number}") for number in range(len(EXAMPLES))]
    assert any(one.endswith("tokens: Once upon a time\n") for one in told)
    assert all(told) and told[-1].startswith("INVALID_PARAMETER: max_tokens")
    assert run(f"{build}/cpp_habits", service.address) == "all as it must be\n"
    wait_until(lambda: num_open(service) == 0, 10, "the engine goes on with what has no reader")
