"""Model discovery: finds the trained models of a program by their use.

    optimizer(parameters)            the parameters are trained
    module(…) with gradients on      the outermost module with some of them is a model

Names play no role. Modules of a trained model, modules without trained parameters and single layers are settled: they
are not checked again. When no parameter is open, `nn.Module.__call__` is PyTorch's again, so a program whose models run
locally has no overhead.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from gemini.capture.patches import PATCH_LOCK

if TYPE_CHECKING:
    from gemini.launcher.process.launch_session import Session

_CALL = nn.Module.__call__
_DISPATCH = "gemini.runtime.interception.dispatch"  # loaded when a model has workers
_PATIENCE = 100_000  # calls of modules after which discovery gives up on parameters that no module uses
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
ReplacementCall = Callable[..., Any]


class Policy(Protocol):
    """Decides how a discovered model runs."""

    @property
    def is_lasting(self) -> bool:
        """Whether discovery lasts as long as parameters are open."""

    def refuses_compiled(self, model: nn.Module) -> bool:
        """Return whether a model that the program has compiled by `torch.compile` runs locally."""

    def decide(self, model: nn.Module) -> ReplacementCall | bool | None:
        """Return True for workers, False or None for this process, or a replacement for this call only."""


class ModelDiscovery:
    """The trained parameters of a process, and the modules that use them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.owner = os.getpid()
        self.models = 0  # decisions so far
        self.layers = 0  # trained layers that the program calls directly
        self._open: dict[int, weakref.ref[Any]] = {}  # trained, of no model yet
        self._with_workers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models
        self._settled: dict[int, weakref.ref[nn.Module]] = {}
        self._passing: dict[int, weakref.ref[nn.Module]] = {}  # settled until the next optimizer
        self._calls = 0
        self._all = False  # every parameter with requires_grad counts as trained
        self._optimizers: dict[int, tuple[str, weakref.ref[Any]]] = {}  # by parameter
        self._places: dict[int, tuple[weakref.ref[Any], str, str]] = {}  # kind and place of construction, by identity

    def register_optimizer(self, optimizer: Any) -> None:
        """Register the parameters of an optimizer as trained."""
        if os.getpid() != self.owner:
            return
        known = (self._open, self._managed_parameters())
        for group in optimizer.param_groups:
            for one in group["params"]:
                if isinstance(one, nn.Parameter) and not any(id(one) in table for table in known):
                    _add_weakly(self._open, one)
                self._optimizers[id(one)] = type(optimizer).__name__, weakref.ref(optimizer)
        self._passing.clear()
        self._calls = 0
        if self._open:
            self._watch()

    def register_place(self, value: Any, kind: str, place: str) -> None:
        """Register where the script has made a model or an optimizer."""
        key = id(value)
        self._places[key] = weakref.ref(value, lambda _: self._places.pop(key, None)), kind, place

    def places_of(self, model: nn.Module) -> dict[str, str]:
        """Return where the script has made a model and its optimizers."""
        own, found = {id(one) for one in model.parameters()}, dict[str, str]()
        for reference, kind, place in [*self._places.values()]:
            value = reference()
            if value is model:
                found["model"] = place
            elif kind == "optimizer" and value is not None:
                trained = {id(one) for group in value.param_groups for one in group["params"]}
                if own & trained:
                    found["optimizer"] = place
        return found

    def register_all(self) -> None:
        """Register every parameter with requires_grad as trained: the program has no PyTorch optimizer."""
        self._all = True
        self._watch()

    def check_call(self, module: nn.Module) -> ReplacementCall | None:
        """Check a module that is called; return a replacement for the call, if any."""
        key = id(module)
        if key in self._settled or key in self._passing or not torch.is_grad_enabled():
            return None
        if os.getpid() != self.owner or torch.compiler.is_compiling():
            return None
        self._calls += 1
        if self._calls > _PATIENCE and not self.policy.is_lasting:
            self._open.clear()
            self._all = False
            self._unwatch()
            return None
        parameters = list(module.parameters())
        if _is_transformed(parameters):
            return None
        if not any(id(one) in self._open or (self._all and one.requires_grad) for one in parameters):
            _add_weakly(self._passing, module)
            return None
        with PATCH_LOCK:  # another thread may have settled it meanwhile
            return None if key in self._settled else self._check_module(module, parameters)

    def _check_module(self, module: nn.Module, parameters: list[nn.Parameter]) -> ReplacementCall | None:
        if isinstance(module, _PARALLEL):
            return None  # its forward calls the model
        around = None
        if _DISPATCH in sys.modules:
            from gemini.runtime.interception.dispatch import enclosing_model

            around = enclosing_model(module)
        if around is not None:  # the program has added a module to a model with workers
            self.settle(around, managed=True)
            return None
        if _is_compiled(module):
            return lambda *args, **kwargs: self._call_compiled(module, args, kwargs)
        is_layer = not any(True for _ in module.children())
        if is_layer or not self._managed_parameters().isdisjoint(map(id, parameters)):
            self.layers += is_layer
            self.settle(module, managed=False)
            return None
        self.models += 1
        decided = self.policy.decide(module)
        if callable(decided):
            return decided
        self.settle(module, managed=decided is True)
        return lambda *args, **kwargs: nn.Module.__call__(module, *args, **kwargs)

    def _call_compiled(self, wrapper: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the result of `torch.compile`; workers run its model uncompiled."""
        model: nn.Module = wrapper._modules["_orig_mod"]
        if self.policy.refuses_compiled(model):
            self.settle(wrapper, managed=False)
            return nn.Module.__call__(wrapper, *args, **kwargs)
        instead = self.check_call(model)
        if self._managed_parameters().issuperset(id(one) for one in model.parameters() if one.requires_grad):
            from gemini.runtime.interception.dispatch import call_wrapped_module

            call_wrapped_module(wrapper, "_orig_mod")
            return nn.Module.__call__(model, *args, **kwargs)
        if instead is not None and id(model) not in self._settled:  # not decided yet
            return instead(*args, **kwargs)
        _add_weakly(self._settled, wrapper)
        return _CALL(wrapper, *args, **kwargs)

    def optimizers_of(self, model: nn.Module) -> str:
        """Return the names of a model's optimizers."""
        found = (self._optimizers.get(id(one)) for one in model.parameters())
        return " and ".join(dict.fromkeys(entry[0] for entry in found if entry)) or "the program"

    def find_optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """Return a model's optimizers, in the order of its parameters."""
        owners = [entry[1]() for one in model.parameters() if (entry := self._optimizers.get(id(one)))]
        return [*{id(one): one for one in owners if isinstance(one, torch.optim.Optimizer)}.values()]

    def optimizer_state_mb(self, model: nn.Module) -> float:
        """Return the size of the present state of a model's optimizers."""
        total = 0
        for one in model.parameters():
            entry = self._optimizers.get(id(one))
            owner = entry and entry[1]()
            values = owner.state.get(one, {}).values() if isinstance(owner, torch.optim.Optimizer) else ()
            total += sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
        return total / 1e6

    def call(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a model in this process by PyTorch's `__call__`."""
        return _CALL(model, *args, **kwargs)

    def pass_over(self, model: nn.Module) -> None:
        """Do not check the modules inside a model that is being timed."""
        for module in model.modules():
            if module is not model:
                _add_weakly(self._passing, module)

    def _managed_parameters(self) -> set[int]:
        """Return the parameters, by id, of models with workers; a weak reference to one would block `swap_tensors`."""
        return {id(one) for model in self._with_workers for one in model.parameters()}

    def settle(self, model: nn.Module, managed: bool) -> None:
        """Record the decision on a model: its modules are not checked again."""
        if managed:
            self._with_workers.add(model)
        for module in model.modules():
            _add_weakly(self._settled, module)
        for one in model.parameters():
            self._open.pop(id(one), None)
        if not self._open and not self._all:
            self._unwatch()

    # ── interception of module calls ─────────────────────────────────────────────────────────────────────────────────
    def _watch(self) -> None:
        with PATCH_LOCK:
            if _DISPATCH in sys.modules:
                from gemini.runtime.interception import dispatch

                if nn.Module.__call__ is dispatch._call:
                    dispatch.set_discovery(self.check_call)
                    return
            if nn.Module.__call__ is _CALL:
                nn.Module.__call__ = _intercepting_call(self)

    def _unwatch(self) -> None:
        if _DISPATCH in sys.modules:
            from gemini.runtime.interception import dispatch

            dispatch.set_discovery(None)
        self.stop_watching()

    def stop_watching(self) -> None:
        """Restore PyTorch's `__call__`, unless the runtime has replaced it."""
        with PATCH_LOCK:
            if getattr(nn.Module.__call__, "is_discovery", False):
                nn.Module.__call__ = _CALL

    def resume(self) -> None:
        """Intercept calls again if parameters are open."""
        if self._open or self._all:
            self._watch()


def _intercepting_call(discovery: ModelDiscovery) -> Any:
    settled, check_call = discovery._settled, discovery.check_call

    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in settled:
            instead = check_call(module)
            if instead is not None:
                return instead(*args, **kwargs)
        return _CALL(module, *args, **kwargs)

    __call__.is_discovery = True  # type: ignore[attr-defined]
    return __call__


def _is_transformed(parameters: list[nn.Parameter]) -> bool:
    """Return whether a call is inside `torch.func`: with other tensors as parameters, or in a transform."""
    if any(not isinstance(one, nn.Parameter) for one in parameters):
        return True
    return bool(torch._C._are_functorch_transforms_active())


def _add_weakly(table: dict[int, weakref.ref[Any]], one: Any) -> None:
    """Add `one` until it is collected, as ids are reused."""
    key = id(one)
    table[key] = weakref.ref(one, lambda _: table.pop(key, None))


def _is_compiled(module: nn.Module) -> bool:
    """Return whether `module` is the wrapper of `torch.compile`."""
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return frame is not None and isinstance(module, frame.OptimizedModule)


def start_discovery(session: Session, folder: str) -> ModelDiscovery:
    """Return the model discovery of a session."""
    from gemini.launcher.policy import policy_for

    policy = policy_for(session, folder)
    policy.discovery = ModelDiscovery(policy)
    return policy.discovery
