"""A DeepSpeed run whose data breaks: its steps are told, and it ends, where it would skip for ever.

Run: torchrun --nproc-per-node 2 examples/deepspeed_observed.py [ZERO_STAGE]
"""

import math
import sys

import deepspeed
import torch
from torch import nn

from halfstep import NonFiniteError
from halfstep.integrations.deepspeed import StepObserver


def main(stage=2, dtype="bf16", broken_from=5, steps=40, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, dtype: {"enabled": True},
        "zero_optimization": {"stage": int(stage)}, **options,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    observer = StepObserver(engine)  # the one line; engine.step() stays
    results, weight = [], next(engine.module.parameters())
    try:
        for step in range(steps):
            draw = torch.Generator().manual_seed(100 * step + engine.global_rank)
            x = torch.randn(4, 8, generator=draw)
            if step >= broken_from:
                x[0, 0] = math.nan
            loss = (engine(x.to(weight.dtype)).float() - x[:, :1].sin()).square().mean()
            engine.backward(loss)
            engine.step()
            results.append(observer.last_step)
    except NonFiniteError as error:
        print(f"step {step}: {error}")
        return [*results, observer.last_step], error
    return results, None


if __name__ == "__main__":
    main(*sys.argv[1:])
