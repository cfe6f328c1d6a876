"""Runs vLLM's server with pictures beside a torch for CPUs.

Its models of pictures import torchvision, whose wheels are of a torch for CUDA. Their operators do not load there, and
nothing here calls any; but what registers more of each would fail, so an empty module stands in its place. In come the
command line of vLLM's server, and torchvision in PYTHONPATH.
"""

import sys
import types

for name in ("_meta_registrations", "_autograd_registrations"):  # in the processes that the server spawns, too
    sys.modules[f"torchvision.{name}"] = types.ModuleType(name)

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
