"""The packaged Java client: its jar on a class path with its dependencies, and every example of its page."""

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conformance.sdks import CLIENTS, SDKS
from tests.system.service import Service

FOLDER = CLIENTS / "java"
IMPORTS, *EXAMPLES = re.findall(r"```java\n(.*?)```", (FOLDER / "README.md").read_text(), re.S)
MORE_IMPORTS = "import io.grpc.*;\nimport java.util.*;\nimport java.util.concurrent.*;\n"
POM = "{http://maven.apache.org/POM/4.0.0}"


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The class path: a copy of the jar away from its sources, and Debian's jars."""
    (sdk,) = (one for one in SDKS if one.name == "java")
    if reason := sdk.build():
        pytest.skip(reason)
    (jar,) = (FOLDER / "build").glob("sluice-client-*.jar")
    place = tmp_path_factory.mktemp("place")
    shutil.copy(jar, place)
    jars = subprocess.run(["sh", str(FOLDER / "classpath.sh")], capture_output=True, text=True, check=True).stdout
    return f"{place / jar.name}:{jars.strip()}"


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs_against_the_jar(number: int, class_path: str, tmp_path: Path, service: Service) -> None:
    example = EXAMPLES[number].replace("127.0.0.1:50051", service.address)
    body = f"public class Example {{\npublic static void main(String[] args) throws Exception {{\n{example}}}\n}}\n"
    source = tmp_path / "Example.java"
    source.write_text(IMPORTS + MORE_IMPORTS + body)
    said = ran(source, class_path, tmp_path)
    assert bool(said) == ("print" in example and "example.com" not in example)


@pytest.mark.long
def test_demand_threads_and_the_ways_out(class_path: str, tmp_path: Path, service: Service) -> None:
    source = FOLDER / "src" / "test" / "java" / "Behaviour.java"
    said = ran(source, class_path, tmp_path, service.address)
    assert len(said.splitlines()) == source.read_text().count("checks.holds(")


def ran(source: Path, class_path: str, folder: Path, *arguments: str) -> str:
    """The output of a program of one file."""
    compiled = ["javac", "--release", "11", "-cp", class_path, "-d", str(folder), str(source)]
    subprocess.run(compiled, check=True, capture_output=True)
    run = ["java", "-XX:TieredStopAtLevel=1", f"-Djava.library.path={FOLDER / 'build' / 'native'}"]
    run += ["-cp", f"{class_path}:{folder}", source.stem, *arguments]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    return done.stdout


def test_the_pom_names_the_versions_of_the_floor() -> None:
    """The versions are those of Debian's own repository of poms, where it is installed."""
    project = ElementTree.parse(FOLDER / "pom.xml").getroot()
    found = {}
    for one in project.iter(f"{POM}dependency"):
        group, artifact, version = (one.findtext(f"{POM}{name}", "") for name in ("groupId", "artifactId", "version"))
        folder = Path("/usr/share/maven-repo", *group.split("."), artifact)
        if not folder.is_dir():
            pytest.skip(f"Debian's {artifact} is not installed")
        found[artifact] = (folder / version).is_dir()
    assert len(found) == 5 and all(found.values()), found
