"""The harness itself: results in rank order, tracebacks or stacks of all ranks in the message, a fresh start after."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, RankPool, run_cases

HERE = "tests.test_ranks"


def total(value: int) -> tuple[int, float]:
    tensor = torch.tensor(float(value))
    dist.all_reduce(tensor)
    return dist.get_rank(), float(tensor)


def one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("from rank one")
    dist.barrier()


def one_hangs() -> None:
    if dist.get_rank() == 1:
        wait_for_the_other()


def wait_for_the_other() -> None:
    dist.barrier()


def test_results_and_failures(ranks: RankPool) -> None:
    assert ranks.run(f"{HERE}:total", value=3) == [(0, 6.0), (1, 6.0)]
    with pytest.raises(RankFailure, match="ValueError: from rank one"):
        ranks.run(f"{HERE}:one_raises")
    with pytest.raises(RankFailure, match=r"did not end[\s\S]*rank 0 ended well[\s\S]*wait_for_the_other"):
        ranks.run(f"{HERE}:one_hangs", timeout=2)
    assert ranks.run(f"{HERE}:total", value=1) == [(0, 2.0), (1, 2.0)]


def test_a_failing_case_does_not_hide_the_next() -> None:
    outcomes = run_cases([(f"{HERE}:one_raises", {}), (f"{HERE}:total", {"value": 2})], world=2)
    assert outcomes[0].failure is not None
    assert outcomes[1].unwrap() == [(0, 4.0), (1, 4.0)]
