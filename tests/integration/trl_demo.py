"""TRL's GRPOTrainer with the demo's model, SmolLM2-135M under LoRA: python -m tests.integration.trl_demo

Three updates on one and on two ranks, ZeRO-2 and ZeRO-3, through TRL's own chunked head, with the block and without it.
What TRL logs must be the same bits on one rank and within 1e-6 on two. Under ZeRO-3 that is asked against TRL with
decoder layers as leaf modules; against plain ZeRO-3, whose hooks inside the layers add gradients up in another order,
the first update must be within 1e-6 (later ones start from other weights). Exit code 1: it is not so. Not in CI: it
takes minutes; `test_trl.py` asks the same of a smaller model.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from examples.arithmetic.model import convert_packaged_model, default_cache_dir, packaged_model
from tests.integration import trl_runs
from tests.integration.test_trl import same, state_of
from tests.models import decoder_layers
from tests.ranks import RankPool

HERE = "tests.integration.trl_demo"
UPDATES = 3
LIMIT_S = 900.0


def trained(folder: str, stage: int, block: dict[str, Any] | None, leaves: bool = False) -> dict[str, Any]:
    """On a rank: what was logged, and what the controller did. `leaves`: decoder layers are leaf modules of ZeRO-3."""
    import ds_hilore
    from ds_hilore.integration.zero3 import leaf_units

    ds_hilore.install()
    settings = trl_runs.ds_json(stage, block)
    trainer = trl_runs.make_trainer(folder, settings, max_steps=UPDATES, per_device_train_batch_size=8)
    with leaf_units(trainer.model, decoder_layers(trainer.model)) if leaves else nullcontext():
        trainer.train()
    return {"logged": trl_runs.logged(trainer), **state_of(trainer)}


def compared(pool: RankPool, folder: Path, stage: int, rel: float) -> list[str]:
    """What differs, and what makes the comparison say nothing."""

    def run(**how: Any) -> list[dict[str, Any]]:
        return pool.run(f"{HERE}:trained", folder=str(folder), stage=stage, timeout=LIMIT_S, **how)

    # without rows left out, whose absence shows in the last bit
    ours = run(block={"prune_zero_exposure": False})
    wrong = []
    for rank, seen in enumerate(ours):
        if (seen["observed"], seen["announced"]) != (1, True):
            wrong.append(f"rank {rank}: the block is not where it should be: {seen}")
        if not (len(seen["logged"]) == UPDATES and any(step["grad_norm"] > 0 for step in seen["logged"])):
            wrong.append(f"rank {rank}: nothing was learnt")
    if stage == 3:
        wrong += _unlike(ours, run(block=None), 1e-6, updates=1)
    return wrong + _unlike(ours, run(block=None, leaves=stage == 3), rel, UPDATES)


def _unlike(ours: list[dict[str, Any]], alone: list[dict[str, Any]], rel: float, updates: int) -> list[str]:
    return [
        f"rank {rank}, update {step['step']:.0f}: {line}"
        for rank, (seen, plain) in enumerate(zip(ours, alone, strict=True))
        for step, expected in list(zip(seen["logged"], plain["logged"], strict=True))[:updates]
        for line in same(step, expected, rel)
    ]


def main() -> int:
    failed = False
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        converted = packaged_model(default_cache_dir())
        convert_packaged_model(converted)
        (folder / "model").symlink_to(converted.resolve())
        for world, rel in ((1, 0.0), (2, 1e-6)):
            with RankPool(world) as pool:
                for stage in (2, 3):
                    wrong = compared(pool, folder, stage, rel)
                    verdict = "not as without the block" if wrong else f"as without the block, {UPDATES} updates"
                    print(f"{world} rank(s), ZeRO-{stage}: {verdict}", *wrong, sep="\n    ", flush=True)
                    failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
