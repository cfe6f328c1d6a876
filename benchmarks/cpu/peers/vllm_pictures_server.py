"""Runs vLLM's server with pictures, prepared by Pillow: other libraries resize to other pixels, and greedy ids differ.

Its models of pictures import two functions from a module of transformers that needs torchvision, which has no wheel for
a torch for CPUs. The module that does without has them, too. In comes the command line of vLLM's server.
"""

import sys

from transformers.models.pixtral import image_processing_pil_pixtral
from vllm.model_executor.models import registry

# At the top: the processes that the server spawns need it, too.
sys.modules["transformers.models.pixtral.image_processing_pixtral"] = image_processing_pil_pixtral
# A model is looked at in a process that does not run this file, unless it was before.
registry._run_in_subprocess = lambda look: look()

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
