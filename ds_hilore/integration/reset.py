"""After an exception in the middle of an update: bring a DeepSpeed engine back to the start of that update.

DeepSpeed has no such function. Doing an interrupted backward again is silently wrong under ZeRO-3 and an assertion
under ZeRO-2 (design fact 4). What an interruption leaves behind, and where it is read from (deepspeed 0.19.8; 0.18.3
has the same but for the names that are looked up with a default):

    engine.py             counters of running backwards, micro_steps, `_in_forward` of all modules, running timers
    base_optimizer.py     depth of backward, counts of fired hooks, "epilogue ran" (the next forward counts it)
    stage_1_and_2.py      .grad, .grad_accum, ipg buckets, params_already_reduced, averaged and accumulated gradients,
                          oversized and postponed parameters, micro_step_id, per-partition flags, overflow flag
    stage3.py             .grad, ipg buckets, params_already_reduced, partitioned gradients, micro_step_id
    parameter_offload.py  FWD_MODULE_STACK, per-module counts of pending backward hooks
    partitioned_param_coordinator.py   parameters in flight or gathered, modules in backward, a half-recorded trace
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ds_hilore.integration.zero3 import REDUCER_ATTRIBUTE


def reset_update(engine: Any) -> None:
    """Makes it right to do the whole current update again, after an exception in it.

    With gradient accumulation the update begins again at its first microbatch: `micro_steps` goes back to the last
    boundary, unless the caller sets boundaries by `set_gradient_accumulation_boundary`: then the caller must set them
    anew. Weights, optimizer state, loss scale, schedulers and random number generators are not touched.

    All ranks must call this, and all must have stopped at the same place in the sequence of collectives: a rank that
    waits in a collective that the others never entered cannot be reached from here. The call itself communicates
    nothing but waits for gathers in flight. Calling it on an engine that is at the start of an update has no effect on
    gradients (ZeRO-3 gathers its persistent parameters again).

    Args:
        engine: a DeepSpeed engine of ZeRO stage 0, 1, 2 or 3, with or without CPU offload. Pipeline engines and NVMe
            offload are not covered. After an interruption within `engine.step` gradients are forgotten too; weights
            that the optimizer has changed by then stay changed.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()
    for parameter in engine.module.parameters():
        parameter.grad = None
    _reset_engine(engine)
    optimizer = engine.optimizer
    _reset_hook_state(optimizer)
    if hasattr(optimizer, "parameter_offload"):
        _reset_parameters_of_stage3(engine)
        _reset_gradients_of_stage3(optimizer)
    elif hasattr(optimizer, "bit16_groups") and hasattr(optimizer, "ipg_buckets"):
        _reset_stage_1_and_2(optimizer)
    elif hasattr(optimizer, "clear_hp_grads"):  # BF16_Optimizer
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
    elif optimizer is not None:
        optimizer.zero_grad()


def _reset_engine(engine: Any) -> None:
    with engine._running_engine_backward_lock:
        engine._running_engine_backward_count = 0
        engine._running_engine_backward = False
    engine._manual_backward_expected = False
    if hasattr(engine, "_unmanaged_backward_count"):
        engine._unmanaged_backward_count = 0
    if engine._is_gradient_accumulation_boundary is None:
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    for module in engine.module.modules():
        if hasattr(module._parameters, "_in_forward"):
            module._parameters._in_forward = False
    names = engine.engine_timers
    for name in (*names.forward_timers, *names.backward_timers, *names.backward_inner_timers):
        engine.timers(name).reset()
    for name in names.backward_reduce_timers:
        engine.timers(name).reset()


def _reset_hook_state(optimizer: Any) -> None:
    """`ZeROOptimizer`'s account of the running backward pass, without its move of micro_step_id."""
    state = getattr(optimizer, "_backward_hook_state", optimizer)
    if hasattr(state, "reset_for_new_step"):
        state.reset_for_new_step()
    values = {
        "backward_active_depth": 0,
        "remaining_grad_acc_hooks": 0,
        "hooks_fired_this_backward": 0,
        "max_expected_hooks_seen": 0,
        "backward_seen_this_step": False,
        "epilogue_ran_this_backward": False,
    }
    for name, value in values.items():
        for attribute in (name, f"_{name}"):  # 0.18.3 keeps them, underscored, on the optimizer itself
            if hasattr(state, attribute):
                setattr(state, attribute, value)


def _reset_stage_1_and_2(optimizer: Any) -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

    if hasattr(optimizer, "_wait_for_offload_copies"):
        optimizer._wait_for_offload_copies()
    optimizer.zero_grad()  # .grad and .grad_accum
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer._release_ipg_buffers()  # also grads_in_partition and ready_for_gradients
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    optimizer.reset_partition_gradient_structures()
    for gradients in optimizer.previous_reduced_grads.values():
        gradients.clear()
    for by_group in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in by_group:  # in place: parameters hold the dictionary
            by_group[group] = None
    optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
    if optimizer.cpu_offload:
        optimizer.local_overflow = False
        optimizer.norm_for_param_grads.clear()
        if hasattr(optimizer, "_offload_accumulated_param_ids"):
            optimizer._offload_accumulated_param_ids = set()
        _zero(group.grad for group in optimizer.single_partition_of_fp32_groups)


def _reset_gradients_of_stage3(optimizer: Any) -> None:
    reducer = getattr(optimizer, REDUCER_ATTRIBUTE, None)
    if reducer is not None:
        reducer.reset()
    optimizer.zero_grad()  # .grad and micro_step_id
    for bucket in optimizer.ipg_buckets.values():
        bucket.params.clear()
        bucket.elements = 0
        if hasattr(bucket, "process_group"):
            bucket.process_group = None
    for parameter_id in optimizer.params_already_reduced:
        optimizer.params_already_reduced[parameter_id] = False
    optimizer.averaged_gradients = {}
    _zero([getattr(optimizer, "grad_partitions_flat_buffer", None)])
    if hasattr(optimizer, "_offload_boundary_param_ids"):
        optimizer._offload_boundary_param_ids = set()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
        _zero(group.grad for group in optimizer.fp32_partitioned_groups_flat)


def _reset_parameters_of_stage3(engine: Any) -> None:
    """Partitions every parameter and forgets who was using it."""
    from deepspeed.runtime.zero import parameter_offload

    own = set(engine.module.modules())
    stack = parameter_offload.FWD_MODULE_STACK
    base = [module for module in stack if module not in own]
    stack[:] = [*base, engine.module]  # DeepSpeed puts the root there when it makes the engine
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    if hasattr(coordinator, "release_backward_leftovers"):
        coordinator.release_backward_leftovers()
    for module in own:
        for count in ("applied_pre_backward_ref_cnt", "ds_grads_remaining"):
            if count in module.__dict__:
                setattr(module, count, 0)
        if hasattr(module, "ds_recompute_parameters"):
            module.ds_recompute_parameters.clear()
    coordinator._clean_inflight_param_registry()
    coordinator.release_and_reset_all(engine.module)
    if coordinator.is_record_trace():  # half a trace; a complete one is only read, and starts anew with each forward
        coordinator._invalidate_trace()


def _zero(tensors: Iterable[torch.Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.zero_()
