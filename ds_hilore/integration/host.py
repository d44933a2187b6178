"""What is changed on an engine and its model while a controller is attached, and how it is changed back."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ds_hilore.core.fabric import ControlPlane
from ds_hilore.integration import megatron, trainer, trl
from ds_hilore.integration.beside import Recording
from ds_hilore.integration.carried import CarriedState
from ds_hilore.integration.checkpoint import DeepSpeedCheckpointPatch
from ds_hilore.integration.gated_mlp import apply_gated_mlps, undo_gated_mlps
from ds_hilore.integration.gradient_checks import GradientChecks
from ds_hilore.integration.gradient_norm import engine_gradient_norm, local_gradient_norm
from ds_hilore.integration.gradient_scale import EngineScale
from ds_hilore.integration.method_patch import applied
from ds_hilore.integration.peft import input_embedding
from ds_hilore.integration.refusals import refuse_compile, refuse_compiled_model, refuse_no_sync
from ds_hilore.integration.reset import reset_update
from ds_hilore.integration.run_log import RunLog
from ds_hilore.integration.selfcheck import Leaving, SelfCheck
from ds_hilore.integration.transformers import CheckpointingGuard, pretrained_models
from ds_hilore.integration.units import Units, apply_wrapping, undo_wrapping
from ds_hilore.runtime.controller import Controller
from ds_hilore.runtime.current import forward_of

_log = logging.getLogger(__name__)

#: What to do where ranks are not at the same place of a run.
_SAME_PLACE = (
    "make the same calls on every rank; where `update` differs, some ranks have stepped and others have not: load a "
    "checkpoint on all of them"
)


@dataclass
class AttachedHost:
    """What was changed on one engine and its model, and how to change it back."""

    engine: Any
    controller: Controller
    plane: ControlPlane
    units: Units
    scale: EngineScale
    log: RunLog
    checks: GradientChecks | None = None  # where plans may compress
    selfcheck: SelfCheck | None = None
    carried: CarriedState | None = None
    said_idle: bool = False
    met_update: int = -1  # the newest update in which ranks have met before a microbatch

    def apply(self) -> None:
        """Changes the model, DeepSpeed's checkpoint function and the engine; all or nothing."""
        self._stack = ExitStack()
        try:
            self._change()
        except BaseException:
            self._stack.close()
            raise

    def _change(self) -> None:
        self._change_model()
        DeepSpeedCheckpointPatch.apply()
        self._stack.callback(DeepSpeedCheckpointPatch.undo)
        self._stack.enter_context(applied([*trainer.patches(), *trl.patches(), *megatron.patches()]))
        self._change_engine()
        self.engine.__dict__["hilore"] = self.controller
        self.engine.__dict__["_hilore_host"] = self

    def _change_model(self) -> None:
        for model in pretrained_models(self.engine.module) if not self.units.wrapped else []:
            guard = CheckpointingGuard(model)
            self._stack.callback(guard.undo)
            guard.apply()
        self._stack.callback(undo_wrapping, self.units.wrapped)
        apply_wrapping(self.units.wrapped)
        if self.controller.parts.techniques.derived_state:
            self._stack.callback(undo_gated_mlps, apply_gated_mlps(self.units.modules))
            self._listen_to_embeddings()

    def _listen_to_embeddings(self) -> None:
        found = [input_embedding(model) for model in pretrained_models(self.engine.module)]
        for embedding in dict.fromkeys(each for each in found if each is not None):
            listening = self.controller.context.lookups.listen(embedding)
            if listening is not None:
                self._stack.callback(listening.remove)

    def _change_engine(self) -> None:
        self._wrap("forward", "backward", "allreduce_gradients", "step", "no_sync", "compile")
        self._wrap("save_checkpoint", "load_checkpoint")

    def _wrap(self, *names: str) -> None:
        """Leads methods of the engine through those of ours that have an underscore before the same name."""
        for name in names:
            original = getattr(self.engine, name)
            self.engine.__dict__[name] = functools.partial(getattr(self, f"_{name}"), original)
            self._stack.callback(self.engine.__dict__.pop, name, None)

    def undo(self) -> None:
        """Gives back hooks, functions and methods; closes planner and control plane."""
        self._stack.close()
        self.engine.__dict__.pop("hilore", None)
        self.engine.__dict__.pop("_hilore_host", None)
        self.log.close()
        self.controller.close()
        self.plane.close()

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        refuse_compiled_model(self.engine.module)
        self._say_if_idle()
        with self._update_at_stake():
            self._meet_ranks()
            self.controller.context.rng_tracker = megatron.rng_trackers()
            with forward_of(self.controller), self._checked_forward() as recordings:
                result = original(*args, **kwargs)
            self.controller.outputs.mark(result)
            for recording in recordings:
                result = recording.leaving(result)
            return result

    def _say_if_idle(self) -> None:
        """transformers checkpoints layers in training mode only, and `from_pretrained` gives models in eval mode."""
        if self.said_idle or any(unit.training for unit in self.units.modules):
            return
        self.said_idle = True
        if len(self.units.wrapped) == len(self.units.modules):  # those are checkpointed in any mode, or there are none
            return
        if self.plane.rank == 0:
            _log.warning(
                "hilore: a forward with gradients, and all units are in eval mode, in which transformers does not "
                "checkpoint them: no plan takes effect, and memory is that of no checkpointing; call engine.train()"
            )

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args:  # `loss`; the rest goes by name in DeepSpeed's own callers
            kwargs = {**dict(zip(("loss", "retain_graph", "scale_wrt_gas"), args)), **kwargs}
        again = kwargs.get("retain_graph", False)
        with self._update_at_stake():
            if self._reduces_in_backward:
                self._meet("backward begins")
            self.controller.begin_backward(may_come_again=again)
            with self.scale.backward(kwargs.get("scale_wrt_gas", True)), self._selfchecked_backward(kwargs.get("loss")):
                result = original(**kwargs)
            if not again:
                self.controller.end_backward()
                self.log.microbatch_done(self.controller)
                if self.selfcheck is not None:
                    self.selfcheck.backward_done()
                if self.checks is not None:
                    self.checks.backward_done()
        return result

    def _allreduce_gradients(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """DeepSpeed calls it when the backward of each microbatch is over; without shards of gradients it waits for
        other ranks only in that of the last one."""
        if not self._reduces_in_backward and self.engine.is_gradient_accumulation_boundary():
            self._meet("gradients are complete")
        original(*args, **kwargs)

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        boundary = self.engine.is_gradient_accumulation_boundary()
        norm = None
        with self._update_at_stake():
            if boundary and self.checks is not None:
                self.checks.before_step()
                norm = local_gradient_norm(self.engine)
            result = original(*args, **kwargs)
        if boundary:
            if self.checks is not None and norm is None:
                norm = engine_gradient_norm(self.engine)
            self.controller.end_update(norm)
            if self.selfcheck is not None:
                self.selfcheck.end_update()
            self.log.update_done(self.controller, self.checks)
            self._write_metrics()
        return result

    @contextmanager
    def _checked_forward(self) -> Iterator[list[Recording | Leaving]]:
        with ExitStack() as stack:
            made = [stack.enter_context(each.forward()) for each in (self.checks, self.selfcheck) if each is not None]
            yield [each for each in made if each is not None]

    def _selfchecked_backward(self, loss: Any) -> AbstractContextManager[None]:
        return nullcontext() if self.selfcheck is None else self.selfcheck.backward(loss)

    def _save_checkpoint(
        self, original: Callable[..., Any], save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(save_dir, tag, *args, **kwargs)
        if self.carried is not None:
            self.carried.save(save_dir, tag)
        return result

    def _load_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.controller.parameters_changed()
        if self.carried is not None and result[0] is not None:  # the path of what was found
            self.carried.load(result[0])
        return result

    def _no_sync(self, original: Callable[..., Any]) -> Any:
        refuse_no_sync(self.engine)
        return original()

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        refuse_compile()

    def _meet_ranks(self) -> None:
        """Before the first collective of a microbatch that a rank could wait for in vain (design fact 16)."""
        if self.plane.world_size == 1 or not self.controller.starts_microbatch:
            return
        # Not by the engine's micro_steps: accelerate steps once per update, so there they count updates.
        first = self.met_update != self.controller.update
        if first or self.engine.zero_optimization_stage() >= 2:
            self.met_update = self.controller.update
            progress = self.controller.progress() | {"micro_steps": self.engine.micro_steps}
            self.plane.agree("microbatch", progress, _SAME_PLACE)

    @property
    def _reduces_in_backward(self) -> bool:
        """Whether gradients are reduced while a backward runs, so that a rank in it waits for those that are not."""
        stage = self.engine.zero_optimization_stage()
        return stage >= 2 or (stage == 1 and bool(self.engine.zero_overlap_comm()))

    def _meet(self, what: str) -> None:
        """Every rank has come this far: what comes next waits for all of them, and longer than the control plane."""
        if self.plane.world_size > 1:
            self.plane.exchange(what, None)

    @contextmanager
    def _update_at_stake(self) -> Iterator[None]:
        """What raises inside leaves the update half done, whoever's it was: doing only this call again would count a
        microbatch twice."""
        try:
            yield
        except BaseException as error:
            self._give_up_update(error)
            raise

    def restart_update(self) -> None:
        """See `deepspeed_engine.restart_update`."""
        self._give_up_update(None)

    def _give_up_update(self, error: BaseException | None) -> None:
        """The update starts again: what DeepSpeed left half done would be silently wrong (design fact 4).

        Raises:
            MemoryExhausted: that is what `error` means.
        """
        exhausted = self.controller.abort(error)
        if self.checks is not None:
            self.checks.abort(error)
        if self.selfcheck is not None:
            self.selfcheck.abort(error)
        reset_update(self.engine)
        self.met_update = -1
        self.log.restart()
        self.plane.update_restarts()
        if exhausted is not None:
            raise exhausted from error

    def _write_metrics(self) -> None:
        monitor = getattr(self.engine, "monitor", None)
        if monitor is not None and monitor.enabled and self.plane.rank == 0:
            samples = self.engine.global_samples
            monitor.write_events([(f"Train/hilore/{k}", v, samples) for k, v in self.controller.metrics().items()])
