"""What tests/optim/test_triton.py runs under Triton's interpreter, in a process of its own.

    TRITON_INTERPRET=1 python tests/optim/triton_programs.py [NAME ...]

Each program asserts, and a line of JSON tells its name and what went wrong. Tensors are on the CPU,
where the kernels' addresses are real ones.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings

import numpy as np
import torch
import triton_kernel_programs as kernel
import triton_step_programs as step

PROGRAMS = {
    **{f"bits-{rule.name}": (kernel.bits_of_every_pair, rule.name) for rule in kernel.KERNELS},
    **{f"host-{rule.name}": (step.against_the_host, rule.name) for rule in kernel.RULES},
    "extremes": (kernel.extremes,),
    "masters": (kernel.masters,),
    "tiles": (step.many_tiles,),
    "changes": (step.changes_between_steps,),
    "captures": (step.captures,),
}

if __name__ == "__main__":
    warnings.simplefilter("error")
    # NumPy, which the interpreter computes with, tells of every inf and NaN; a GPU does not.
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PROGRAMS:
        program, *arguments = PROGRAMS[name]
        try:
            program(*arguments)
        except Exception:  # each is told, and the others run
            print(json.dumps([name, traceback.format_exc()]), flush=True)
        else:
            print(json.dumps([name, None]), flush=True)
