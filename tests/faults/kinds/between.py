"""What a host or a user does between forward and backward, around them, and more than once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

import ds_hilore
from ds_hilore.core.errors import HiLoReError
from ds_hilore.core.types import Action
from tests.engines import gradients
from tests.faults.bench import Bench, hilore_engine, policy_loss
from tests.faults.records import FAULTY, Fault, Pair, Place, Plans, Site, update
from tests.faults.sites import Strike, between, edited, in_backward, shared_folder
from tests.models import batch, decoder_layers

#: Weights of an adapter in the middle of the model.
PROJECTION = "self_attn.o_proj"


def fault(name: str, site: Site, **more: Any) -> Fault:
    return Fault(name, Place.BETWEEN, site, **more)


def done(name: str, run: Callable[[Bench], Pair], **more: Any) -> Fault:
    return Fault(name, Place.BETWEEN, run=run, **more)


# -- between forward and backward ----------------------------------------------------------------------------------


def _projection(bench: Bench) -> Any:
    return decoder_layers(bench.ours.module)[1].get_submodule(PROJECTION)


def frozen_weight_changed(bench: Bench) -> None:
    weight = _projection(bench).base_layer.weight
    with torch.no_grad():
        weight.mul_(1.0)  # any write counts: nobody can tell what it was


def adapter_changed(bench: Bench) -> None:
    with torch.no_grad():
        _projection(bench).lora_A["default"].weight.mul_(1.0)


def stepped(bench: Bench) -> None:
    """The optimizer of another loop steps: parameters are what they were, since the learning rate is 0."""
    bench.ours.hilore.parameters_changed()


def loaded(bench: Bench) -> None:
    folder = shared_folder()
    bench.ours.save_checkpoint(folder, tag="one")
    bench.ours.load_checkpoint(folder, tag="one")


def checkpointing_reset(bench: Bench) -> None:
    import deepspeed

    deepspeed.checkpointing.reset()


def checkpointing_configured(bench: Bench) -> None:
    import deepspeed

    deepspeed.checkpointing.configure(None, partition_activations=False)


def checkpointing_switched_off(bench: Bench) -> None:
    model = bench.ours.module.get_base_model()
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable()


def reseeded(bench: Bench) -> None:
    torch.manual_seed(12345)


def collected(bench: Bench) -> None:
    gc.collect()


def refused_calls(bench: Bench) -> None:
    """A host tries what is refused, and goes on."""
    calls = (
        bench.ours.compile,
        lambda: bench.ours.hilore.force("R"),
        lambda: ds_hilore.begin_update([torch.ones(2)], [], 8, engine=bench.ours),
        lambda: ds_hilore.begin_microbatch(torch.ones(3), torch.ones(2, 4), 8, engine=bench.ours),
    )
    for call in calls:
        try:
            call()
        except HiLoReError:
            continue
        raise AssertionError("nothing was refused")


def sampled(bench: Bench) -> None:
    """Sampling, with the engine in eval mode meanwhile."""
    made = bench.ours
    made.eval()
    with torch.no_grad():
        made(input_ids=batch(5)[0], use_cache=False)
    made.train()


def failed_sampling(bench: Bench) -> None:
    hook = bench.ours.module.register_forward_hook(lambda *_: 1 / 0)
    try:
        sampled(bench)
    except ZeroDivisionError:
        bench.ours.train()
    else:
        raise AssertionError("nothing was raised")
    finally:
        hook.remove()


@contextmanager
def left_in_eval_mode(bench: Bench, strike: Strike) -> Iterator[None]:
    """The replay would draw no dropout."""
    with between(lambda bench: bench.ours.eval())(bench, strike):
        try:
            yield
        finally:
            bench.ours.train()


@contextmanager
def adapters_switched_off(bench: Bench, strike: Strike) -> Iterator[None]:
    with ExitStack() as stack:
        disable = bench.ours.module.disable_adapter
        with between(lambda _: stack.enter_context(disable()))(bench, strike):
            yield


@contextmanager
def adapters_merged(bench: Bench, strike: Strike) -> Iterator[None]:
    """Weights are what they were when it is over."""
    model = bench.ours.module
    kept = {name: value.clone() for name, value in model.named_parameters() if "base_layer" in name}
    try:
        with between(lambda _: model.merge_adapter())(bench, strike):
            yield
    finally:
        model.unmerge_adapter()
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name in kept:
                    value.copy_(kept[name])


@contextmanager
def other_work_in_replay(bench: Bench, strike: Strike) -> Iterator[None]:
    """It computes in double precision there, and saves other tensors."""

    def change(_module: Any, _args: Any, output: Tensor) -> Tensor:
        precise = in_backward() and strike.due()
        return torch.tanh(output.double() if precise else output).to(output.dtype)

    hook = decoder_layers(bench.ours.module)[1].get_submodule(PROJECTION).register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


# -- around, and more than once ------------------------------------------------------------------------------------


def microbatches(bench: Bench, one: Callable[[Any, Tensor, Tensor], object]) -> Pair:
    """An update in which `one` does forward and backward of a microbatch, on both engines."""

    def run(made: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number in range(made.gradient_accumulation_steps()):
            torch.manual_seed(number)
            one(made, *batch(seed=number))
            if made.is_gradient_accumulation_boundary():
                found = gradients(made)
            made.step()
        return found

    expected = run(bench.reference)
    return run(bench.ours), expected


def twice(bench: Bench) -> Pair:
    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        loss = policy_loss(made, ids, advantages)
        made.backward(loss, retain_graph=True)
        made.backward(3 * loss)

    return microbatches(bench, one)


def backward_again(bench: Bench) -> Pair:
    """Of a graph that is gone."""
    loss = policy_loss(bench.ours, *batch(1))
    bench.ours.backward(loss)
    loss.backward()
    raise AssertionError("nothing was raised")


def two_forwards(bench: Bench) -> Pair:
    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        made.backward(policy_loss(made, ids, advantages) + policy_loss(made, ids.flip(0), advantages))

    return microbatches(bench, one)


def direct_backward(bench: Bench) -> Pair:
    """On an engine of its own: DeepSpeed alone cannot do it any more once it has had two forwards before a backward."""
    bench.borrow(hilore_engine(bench.stage)).hilore.force(Action.RECOMPUTE)

    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        loss = policy_loss(made, ids, advantages)
        if made is bench.ours:
            loss.backward()
        else:
            made.backward(loss)

    return microbatches(bench, one)


def dropped_forward(bench: Bench) -> Pair:
    """A forward whose loss nobody differentiates."""

    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        numbers = torch.get_rng_state()
        if made is bench.ours:
            policy_loss(made, ids, advantages)
        torch.set_rng_state(numbers)
        made.backward(policy_loss(made, ids, advantages))

    return microbatches(bench, one)


def on_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` gives, in a thread of its own."""
    given: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            given.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return given[0]


def backward_on_a_thread(bench: Bench) -> Pair:
    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        loss = policy_loss(made, ids, advantages)
        on_a_thread(lambda: made.backward(loss))

    return microbatches(bench, one)


def forward_on_a_thread(bench: Bench) -> Pair:
    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        made.backward(on_a_thread(lambda: policy_loss(made, ids, advantages)))

    return microbatches(bench, one)


def update_on_a_thread(bench: Bench) -> Pair:
    expected = bench.expected(FAULTY)
    return on_a_thread(lambda: bench.update(FAULTY)), expected


def saved_on_cpu(bench: Bench) -> Pair:
    """The caller's own hooks lie around ours."""
    with torch.autograd.graph.save_on_cpu():
        return update(bench)


def under_autocast(bench: Bench) -> Pair:
    """Forward under autocast, backward outside of it."""

    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = policy_loss(made, ids, advantages)
        made.backward(loss)

    return microbatches(bench, one)


def other_default_dtype(bench: Bench) -> Pair:
    def change(_: Bench) -> None:
        torch.set_default_dtype(torch.float64)

    try:
        bench.between.append(lambda: change(bench))
        return update(bench)
    finally:
        torch.set_default_dtype(torch.float32)


def other_shapes(bench: Bench) -> Pair:
    """Every microbatch has another number of rows and tokens, and every rank too."""
    rank = torch.distributed.get_rank()

    def one(made: Any, ids: Tensor, advantages: Tensor) -> None:
        rows, tokens = (1, 7 + 13 * rank) if ids[0, 0] % 2 else (3, 21 - 5 * rank)
        made.backward(policy_loss(made, *batch(int(ids[0, 0]), rows, tokens)))

    return microbatches(bench, one)


def single_threaded_autograd(bench: Bench) -> Pair:
    with torch.autograd.set_multithreading_enabled(False):
        return update(bench)


def anomaly_mode(bench: Bench) -> Pair:
    with torch.autograd.detect_anomaly(check_nan=False):
        return update(bench)


FAULTS: tuple[Fault, ...] = (
    fault("a unit's input is changed in place", edited(1, output=False), becomes="StateChanged"),
    fault(
        "a unit's input is changed in place, on one rank",
        edited(1, output=False),
        becomes="StateChanged",
        ranks=(1,),
        others="RankMismatch",
        stages=(0, 1),
    ),
    fault(
        "a stored unit's input is changed in place",
        edited(1, output=False),
        plan=Plans.STORE,
        becomes="StateChanged",
        thorough=True,
    ),
    fault("the last unit's output is changed in place", edited(2, output=True), becomes="RuntimeError"),
    fault(
        "a frozen weight is written before backward",
        between(frozen_weight_changed),
        becomes="StateChanged",
        stages=(2,),
    ),
    fault(
        "an adapter is written before backward",
        between(adapter_changed),
        becomes="StateChanged",
        stages=(2,),
        thorough=True,
    ),
    fault("a step before backward", between(stepped), becomes="StateChanged"),
    fault("a checkpoint is loaded before backward", between(loaded), becomes="RuntimeError"),
    fault("adapters are merged before backward", adapters_merged, becomes="RecoveryMismatch", stages=(2,)),
    fault(
        "adapters are switched off before backward",
        adapters_switched_off,
        plan=Plans.REPLAY,
        becomes="RecoveryMismatch",
    ),
    fault("eval mode before backward", left_in_eval_mode, plan=Plans.REPLAY, becomes="RecoveryMismatch"),
    fault("a unit does other work in its replay", other_work_in_replay, plan=Plans.REPLAY, becomes="RecoveryMismatch"),
    fault("deepspeed.checkpointing.reset() before backward", between(checkpointing_reset)),
    fault("deepspeed.checkpointing.configure() before backward", between(checkpointing_configured), thorough=True),
    fault("checkpointing is switched off and on before backward", between(checkpointing_switched_off), thorough=True),
    fault("random numbers are seeded anew before backward", between(reseeded), plan=Plans.REPLAY),
    fault("garbage is collected before backward", between(collected), thorough=True),
    fault("refused calls before backward", between(refused_calls)),
    fault("sampling before backward", between(sampled), plan=Plans.REPLAY),
    fault("sampling that fails before backward", between(failed_sampling), plan=Plans.REPLAY),
    done("two backwards of one graph (retain_graph)", twice, stages=(0, 1)),
    done("a second backward of a graph that is gone", backward_again, becomes="RuntimeError", outside=True),
    done("two forwards before one backward", two_forwards, stages=(0, 1, 3)),
    done("loss.backward() in place of engine.backward()", direct_backward, stages=(2, 3)),
    done("a forward that is dropped", dropped_forward),
    done("backward in a thread of its own", backward_on_a_thread),
    done("forward in a thread of its own", forward_on_a_thread, thorough=True),
    done("the whole update in a thread of its own", update_on_a_thread),
    done("autograd without threads", single_threaded_autograd),
    done("autograd's anomaly mode", anomaly_mode, thorough=True),
    done("saved tensors are led to the CPU by the caller's hooks", saved_on_cpu),
    done("forward under autocast, backward outside", under_autocast, plan=Plans.REPLAY),
    done("another default dtype before backward", other_default_dtype, plan=Plans.REPLAY, thorough=True),
    done("other shapes in every microbatch and rank", other_shapes, plan=Plans.REPLAY),
)
