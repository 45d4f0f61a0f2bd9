"""Dispatch: intercepts module calls; remote modules run in their workers, all other code runs as the script wrote it.

`nn.Module.__call__` is replaced once; weak tables record which modules are managed and which are remote. The script's
forward runs in the controller, in Python, with all its branches; only remote modules run elsewhere.

    call of a managed model   Local     guards or the first call: this process
                              Deferred  pipelined with its loss (`gemini.runtime.pipelined`)
                              Eager     the forward runs here, its remote modules in the workers
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gemini.capture.module_hooks import run_with_hooks
from gemini.capture.patches import ORIGINAL_CALL, PATCH_LOCK
from gemini.errors import WorkerError
from gemini.guards.active_modes import active_mode, is_running_backward
from gemini.guards.functional_call import SwappedParametersError, are_computed
from gemini.ir.hook_tables import has_any_hooks
from gemini.malloc import trim_if_large
from gemini.purity.proof import find_impure_argument
from gemini.runtime.call_outcome import CallPath, Completed, Deferred, FallbackReason, Local, Outcome
from gemini.runtime.devices.forked_memory import shares_with_parent
from gemini.runtime.eager.first_call_trace import FirstCallTrace
from gemini.runtime.eager.microbatches import SplitCall, run_forward
from gemini.runtime.eager.remote_call import ModuleCall, RefusedError
from gemini.runtime.eager.remote_module import RemoteModule
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.interception.model_registry import find_registered, register
from gemini.runtime.local_mode import LOCAL_MODE, run_locally
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.signals import DeferredSignals
from gemini.runtime.pool.worker_handle import InternalFault, raise_internal_fault
from gemini.runtime.tracebacks import shorten_traceback

# References both ways would keep a model alive for ever: its state holds the remote modules.
_Entry = tuple["weakref.ref[ManagedModel]", "weakref.ref[RemoteModule]"]
_remote_modules: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()


# Wrappers whose forward would not reach the model inside: the module that is called in their place.
_wrapped: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
# Called for modules that are not managed; it may manage one, and returns what to call instead.
Discovery = Callable[[nn.Module], Callable[..., Any] | None]
_discover: Discovery | None = None


class _DispatchState(threading.local):
    first_call: FirstCallTrace | None = None
    model: nn.Module | None = None  # the managed model that is being called


_state = _DispatchState()


def manage(model: nn.Module, managed: ManagedModel) -> None:
    """Intercept the calls of a model from now on."""
    register(model, managed)
    with PATCH_LOCK:
        if nn.Module.__call__ is ORIGINAL_CALL:
            nn.Module.__call__ = _call


def find_managed(model: nn.Module) -> ManagedModel | None:
    """Return the state of a managed model, or None."""
    return find_registered(model)


def enclosing_model(module: nn.Module) -> nn.Module | None:
    """Return the managed model that is being called, where a module is a part of it."""
    model = _state.model
    return model if model is not None and any(one is module for one in model.modules()) else None


def call_wrapped_module(wrapper: nn.Module, name: str) -> None:
    """From now on, call the module that a wrapper holds under a name in place of the wrapper."""
    _wrapped[wrapper] = name


def set_discovery(ask: Discovery | None) -> None:
    """Set the function that is called for every module call that is not managed; None: none."""
    global _discover  # noqa: PLW0603 - one discovery per process
    _discover = ask


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # torch.compile must see, and compile, the script's own code.
    if torch.compiler.is_compiling() or LOCAL_MODE.is_set:
        return ORIGINAL_CALL(module, *args, **kwargs)
    if _state.first_call is not None:
        return _state.first_call.call(module, lambda: ORIGINAL_CALL(module, *args, **kwargs))
    found = _remote_modules.get(module)
    if found is not None:
        managed, remote = found[0](), found[1]()
        if managed is not None and remote is not None:
            if not has_any_hooks(module):
                return _call_remote(managed, remote, module, args, kwargs)
            return run_with_hooks(
                module, args, kwargs, lambda forward, a, k: _call_remote(managed, remote, forward, a, k), has_any_hooks
            )
    known = find_registered(module)
    if known is not None and known.pool.is_ours:
        around, _state.model = _state.model, module
        try:
            return _call_model(module, known, args, kwargs)
        except BaseException as error:
            shorten_traceback(error)
            raise
        finally:
            _state.model = around
    if known is not None and shares_with_parent():
        text = "shares its parameters with the process that forked this one, which may change them"
        known.record.say(f"{known.name} {text}", once=text)
    if module in _wrapped:
        return module._modules[_wrapped[module]](*args, **kwargs)
    if known is None and _discover is not None:
        instead = _discover(module)
        if instead is not None:
            return instead(*args, **kwargs)
    return ORIGINAL_CALL(module, *args, **kwargs)


def _call_model(model: nn.Module, managed: ManagedModel, args: Any, kwargs: Any) -> Any:
    """Run a call of a managed model by the fastest path that applies."""
    if local := _check_local(model, managed):
        return _run_model_local(model, managed, local.reason, args, kwargs)
    if not managed.planned:
        if is_running_backward():  # a checkpoint runs a local call again
            return ORIGINAL_CALL(model, *args, **kwargs)
        if are_computed([*model.parameters()]):  # temporary, as in functional_call
            return _run_model_local(model, managed, FallbackReason.SWAPPED_PARAMETERS, args, kwargs)
        if managed.first_call is None or managed.first_call.waits_for_backward:
            return _first_call(model, managed, args, kwargs)
        _place(model, managed, managed.first_call)
        if local := _check_local(model, managed):  # by the workers' class attributes, or their loss
            return _run_model_local(model, managed, local.reason, args, kwargs)
    pipelined = managed.pipelined
    if pipelined is not None and not is_running_backward():
        return run_with_hooks(
            model, args, kwargs,
            lambda forward, a, k: _follow(pipelined, pipelined.call(model, forward, a, k), model, forward),
        )  # fmt: skip
    if pipelined is None and managed.remote_modules and managed.micro_batches > 1:
        return run_with_hooks(model, args, kwargs, lambda forward, a, k: _run_eager(model, managed, forward, a, k))
    if pipelined is None:
        managed.journal.record(CallPath.EAGER if managed.remote_modules else CallPath.LOCAL)
    trim_if_large()
    return ORIGINAL_CALL(model, *args, **kwargs)


def _check_local(model: nn.Module, managed: ManagedModel) -> Local | None:
    """Return why a call must run in this process; None where it may use the workers. Logs a new reason."""
    if reason := managed.guards.check(model):
        managed.record.say(f"{managed.name} runs in this process while {reason}", once=reason)
        return Local(reason)
    if reason := managed.local_reason:
        managed.give_up(reason)
        return Local(reason)
    return None


def _follow(pipelined: PipelinedModel, outcome: Outcome, model: nn.Module, forward: Any) -> Any:
    """Return the output of a call by the path of its outcome."""
    if isinstance(outcome, (Deferred, Completed)):
        return outcome.output
    if isinstance(outcome, Local):
        with run_locally():
            return pipelined.fall_back(outcome, model, forward)
    return pipelined.fall_back(outcome, model, forward)


def _run_eager(model: nn.Module, managed: ManagedModel, forward: Any, args: Any, kwargs: Any) -> Any:
    """Run a call by eager dispatch: by micro-batches where that is proven, else the batch as one."""
    # A trial run, or micro-batches, would repeat the effects of impure code.
    reason = managed.guards.reads.check(model) or find_impure_argument((args, kwargs), model)
    if not reason:
        with run_locally():
            proof = managed.prove_call(model, args, kwargs)
        reason = proof.reason
        if not reason:
            managed.journal.record(CallPath.EAGER)
            trim_if_large()
            try:
                return SplitCall(model, args, kwargs, proof, managed.micro_batches).run()
            except InternalFault as fault:  # nothing is random or written, else the call would not have been split
                managed.record.demote(f"splitting a batch of {managed.name}", fault)
                managed.micro_batches = 1
                return run_forward(model, forward, args, kwargs)
    managed.journal.record(CallPath.EAGER, f"the batch is not split: {reason}")
    return run_forward(model, forward, args, kwargs)


def _place(model: nn.Module, managed: ManagedModel, first_call: FirstCallTrace) -> None:
    try:
        with DeferredSignals():
            _register_remote(managed, managed.plan(model, first_call))
    except WorkerError as error:
        if not managed.record.survives:
            raise
        managed.give_up(str(error))
    except Exception as error:
        managed.remote_modules.clear()
        managed.record.demote(managed.name, error)


def _first_call(model: nn.Module, managed: ManagedModel, args: Any, kwargs: Any) -> Any:
    """Trace a call. Modules are placed before the next, so that parts that backward runs again run locally too."""
    managed.journal.record(CallPath.LOCAL, FallbackReason.FIRST_CALL)
    first_call = FirstCallTrace(model)
    managed.guards.reads.check(model)  # records values before the first run, which may change some
    try:
        _state.first_call = first_call
        stages = managed.pipelined and managed.pipelined.plans.find_edited_stages(model, args, kwargs)
        if stages:
            result = first_call.run(lambda: stages(*args, **kwargs))
        else:
            result = first_call.run(lambda: ORIGINAL_CALL(model, *args, **kwargs))
    finally:
        _state.first_call = None
    managed.guards.reads.check(model)  # marks what the call has changed
    managed.guards.reads.refresh()  # it may have added attributes
    first_call.finish()
    managed.first_call = first_call
    return result


def _register_remote(managed: ManagedModel, remotes: dict[nn.Module, RemoteModule]) -> None:
    for module, remote in remotes.items():
        _remote_modules[module] = (weakref.ref(managed), weakref.ref(remote))


def _call_remote(managed: ManagedModel, remote: RemoteModule, forward: Any, args: Any, kwargs: Any) -> Any:
    """Run a call of a remote module as a transaction: after an internal failure it is undone and runs locally."""
    if not managed.pool.is_ours or active_mode():
        return _run_local(forward, args, kwargs)
    if reason := managed.local_reason:
        managed.give_up(reason)
        return _run_local(forward, args, kwargs)
    call: ModuleCall | None = None
    try:
        with DeferredSignals():
            try:
                reason = remote.find_obstacle()
            except SwappedParametersError:
                raise
            except Exception as error:
                raise_internal_fault(error, f"checking {remote.name}")
            if not reason:
                call = ModuleCall(remote, args, kwargs)
                managed.calls += 1
                return call.run()
    except SwappedParametersError:
        return _run_local(forward, args, kwargs)
    except RefusedError as refusal:
        reason = str(refusal)
    except InternalFault as fault:
        if call is not None:
            call.undo()
        managed.record.demote(remote.forward_text, fault)
        reason = str(fault)
    except WorkerError as error:
        if call is not None:
            call.undo()
            managed.record.save(call, "forward", error)
        if not managed.record.survives:
            raise
        managed.give_up(str(error))
        return _run_local(forward, args, kwargs)
    with DeferredSignals():
        _remote_modules.pop(remote.module, None)
        _register_remote(managed, managed.split(remote, reason))
    # The call has been undone: run it again, with the modules inside it remote where possible.
    return forward(*args, **kwargs) if not isinstance(forward, nn.Module) else ORIGINAL_CALL(forward, *args, **kwargs)


def _run_model_local(model: nn.Module, managed: ManagedModel, reason: str, args: Any, kwargs: Any) -> Any:
    """Run a call of a model in this process, and count it."""
    if not is_running_backward():  # else a checkpoint runs an earlier call again
        managed.journal.record(CallPath.LOCAL, reason.partition("\n")[0])
    return _run_local(model, args, kwargs)


def _run_local(forward: Any, args: Any, kwargs: Any) -> Any:
    """Run a call, with everything inside it, in this process."""
    with run_locally():
        return forward(*args, **kwargs)
