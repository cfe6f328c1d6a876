"""The pages of clients that are built from Debian's packages: they name what `--no-install-recommends` leaves out."""

import re

import pytest

from tests.conformance.sdks import CLIENTS

NEEDED = {
    "cpp": {"cmake", "make", "g++", "libgrpc++-dev", "libprotobuf-dev", "protobuf-compiler-grpc"},
    "go": {
        "golang-go",
        "golang-google-grpc-dev",
        "golang-google-protobuf-dev",
        "golang-github-golang-protobuf-1-5-dev",
    },
    "java": {"openjdk-17-jdk-headless", "protobuf-compiler", "protobuf-compiler-grpc-java-plugin", "libprotobuf-dev"},
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_page_names_every_package(name: str) -> None:
    page = (CLIENTS / name / "README.md").read_text()
    (command,) = re.findall(r"^apt-get install --no-install-recommends ((?:.|\\\n)*?[^\\])$", page, re.M)
    named = set(command.replace("\\\n", " ").split())
    assert NEEDED[name] <= named
    if name == "java":  # and the jars of the class path
        jars = re.search(r'^packages="(.*)"', (CLIENTS / name / "classpath.sh").read_text(), re.M)
        assert jars and set(jars[1].split()) <= named
