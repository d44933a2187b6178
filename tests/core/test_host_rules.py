"""What a DeepSpeed JSON may not switch on beside the block, and what loses its effect."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import UnsupportedError
from ds_hilore.core.host_rules import check_against_ds_json, zero_stage

PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "compile": {"deepcompile": False},
    "sequence_parallel_size": 1,
    "tensor_parallel": {"autotp_size": 0},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "zero_hpz_partition_size": 2,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu", "super_offload": False},
        "zenflow": None,
    },
}

REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"compile": {"deepcompile": True}}, ("compile.deepcompile = True", "DeepCompile", "set it to false")),
    ({"compile": {"enabled": True}}, ("compile.enabled = True", "torch.compile", "inside the units")),
    ({"compile": {"autoep_non_moe": True}}, ("compile.autoep_non_moe = True", "set it to false")),
    ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, ("zero_optimization.zenflow", "remove")),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        ("zero_optimization.offload_optimizer.super_offload = True", "plain optimizer offload works"),
    ),
    ({"tensor_parallel": {"autotp_size": 2}}, ("tensor_parallel.autotp_size = 2", "ZeRO-3")),
    ({"sequence_parallel_size": 2}, ("sequence_parallel_size = 2", "set it to 1")),
    ({"expert_parallel": {"enabled": True}}, ("expert_parallel.enabled = True", "ZeRO-3")),
]


def test_an_ordinary_json_raises_nothing_and_says_nothing() -> None:
    assert check_against_ds_json(HiLoReConfig(), PLAIN) == []
    assert check_against_ds_json(HiLoReConfig(), {}) == []


@pytest.mark.parametrize(("ds", "words"), REFUSED, ids=[next(iter(ds)) + str(i) for i, (ds, _) in enumerate(REFUSED)])
def test_unproven_features_are_refused_with_the_way_out(ds: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_against_ds_json(HiLoReConfig(), ds)
    for word in words:
        assert word in str(caught.value)


def test_all_refusals_are_named_at_once() -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_against_ds_json(HiLoReConfig(), {"compile": {"deepcompile": True}, "sequence_parallel_size": 4})
    assert "DeepCompile" in str(caught.value) and "sequence parallelism" in str(caught.value)


def test_a_disabled_block_refuses_nothing() -> None:
    assert check_against_ds_json(HiLoReConfig(enabled=False), {"compile": {"deepcompile": True}}) == []


def test_partitioned_activations_are_refused_only_where_there_is_something_to_split() -> None:
    ds = {"activation_checkpointing": {"partition_activations": True}}
    assert check_against_ds_json(HiLoReConfig(), ds) == [
        "activation_checkpointing.partition_activations = True is without effect: there are no model-parallel ranks "
        "to split unit inputs over"
    ]
    with pytest.raises(UnsupportedError, match="partition_activations = true: it splits unit inputs over the 2"):
        check_against_ds_json(HiLoReConfig(), ds, model_parallel_size=2)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("number_checkpoints", 4, "superseded"),
        ("contiguous_memory_optimization", True, "superseded"),
        ("synchronize_checkpoint_boundary", True, "superseded"),
        ("profile", True, "superseded"),
        ("cpu_checkpointing", True, "superseded by plans"),
        ("partitioned_activations", True, 'did you mean "partition_activations"'),  # as DeepSpeed's own help has it
    ],
)
def test_keys_without_their_effect_are_named(key: str, value: Any, words: str) -> None:
    (line,) = check_against_ds_json(HiLoReConfig(), {"activation_checkpointing": {key: value}})
    assert f"activation_checkpointing.{key}" in line and words in line


def test_keys_that_are_off_are_not_named() -> None:
    off = {"partition_activations": False, "cpu_checkpointing": False, "profile": False, "number_checkpoints": None}
    assert check_against_ds_json(HiLoReConfig(), {"activation_checkpointing": off}) == []


@pytest.mark.parametrize(
    ("zero", "stage"),
    [({"stage": 3}, 3), ({"stage": "auto"}, 0), ({}, 0), (None, 0), ("auto", 0)],
)
def test_stage_that_a_json_names(zero: object, stage: int) -> None:
    assert zero_stage({"zero_optimization": zero}) == stage
    assert zero_stage({}) == 0
