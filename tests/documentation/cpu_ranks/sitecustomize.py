"""What CPU processes of a documented command do otherwise: Accelerate and DeepSpeed have these ways for accelerators only.

Python runs this at its start where the folder is in ``PYTHONPATH``.
"""

import os
import sys
from pathlib import Path

if "RANK" in os.environ:
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" or os.environ.get("SHARDED_ON_CPU"):
        sys.path.append(str(Path(__file__).parents[2] / "integrations"))
        import fsdp_on_cpu

        fsdp_on_cpu.enable()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" or os.environ.get("DEEPSPEED_ON_CPU"):
        import deepspeed.ops

        # Collectives in shared memory, which DeepSpeed would compile first; without them it uses gloo.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
