"""A plugin for pytest, `-p tests.isa.forced`: holds the process to the kernels of our own that a set names."""

import os

from sluice_server.kernels.cpu import builds
from tests.isa.sets import KERNELS, NONE

name = os.environ.get(KERNELS, "")
if name:
    builds.MODULE = None if name == NONE else builds.load(name)
