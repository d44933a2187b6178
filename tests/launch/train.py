"""A user's training script, as the launchers start it: a few updates of a tiny model on DeepSpeed.

    mpirun -np 2 python tests/launch/train.py --deepspeed_config ds.json --out FOLDER

Each rank writes rank-N.pt into FOLDER: its gradients of every update, and what its control plane and plans were. With
`--beside PLAIN.json` the same updates run first on an engine of that config.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ds_hilore
from tests.engines import gradients
from tests.models import batch, llama, lora, plain_loss


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--beside", help="DeepSpeed JSON of a run to compare with")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=240.0)
    return parser.parse_args()


def train(config: str, updates: int) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """The engine, and the reduced gradients of each update."""
    model = lora(llama())
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    rank = torch.distributed.get_rank()
    rows = engine.train_micro_batch_size_per_gpu()
    found = []
    for number in range(updates):
        for k in range(engine.gradient_accumulation_steps()):
            ids, advantages = batch(seed=1000 * rank + 10 * number + k, rows=rows, tokens=96)
            engine.backward(plain_loss(engine, ids.to(engine.device), advantages.to(engine.device)))
            if engine.is_gradient_accumulation_boundary():
                found.append(gradients(engine))
            engine.step()
        if getattr(engine, "hilore", None) is not None:
            engine.hilore.parts.planner.wait(60)
    return engine, found


def main() -> None:
    args = arguments()
    # A rank that hangs shows where, and ends the job.
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    torch.set_num_threads(1)
    deepspeed.init_distributed(distributed_port=int(os.environ.get("MASTER_PORT", "29500")), verbose=False)
    expected = train(args.beside, args.updates)[1] if args.beside else None
    ds_hilore.install()
    engine, found = train(args.deepspeed_config, args.updates)
    answer: dict[str, Any] = {"gradients": found, "expected": expected}
    controller = getattr(engine, "hilore", None)
    if controller is not None:
        host = engine._hilore_host
        answer |= {
            "plane": type(host.plane).__name__,
            "node": host.plane.node_ranks(),
            "stage": controller.stage.value,
            "actions": [action.value for action in controller.microbatch.ran.values()],
        }
        ds_hilore.detach(engine)
    unfinished = args.out / f"rank-{torch.distributed.get_rank()}.tmp"
    torch.save(answer, unfinished)
    unfinished.rename(unfinished.with_suffix(".pt"))
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
