"""A pytest plugin, `-p tests.isa.forced`: restricts the process to our kernels of one instruction set."""

import os

from sluice_server.kernels.cpu import builds
from tests.isa.sets import KERNELS, NONE

name = os.environ.get(KERNELS, "")
if name:
    builds.MODULE = None if name == NONE else builds.load(name)
