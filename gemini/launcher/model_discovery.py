"""Recognition: the models of a program, found by what it does with them.

    optimizer(parameters)            the parameters are trained
    module(…) with gradients on      the outermost module that holds some of them is a model

No name is looked at. Modules of a trained model, modules without trained parameters and single layers are settled: they
are not asked about again, and where nothing is open `nn.Module.__call__` is torch's own again, so that a program whose
models run here has no overhead.
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
_PATIENCE = 100_000  # calls of modules after which parameters that no module uses are not waited for
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
Instead = Callable[..., Any]


class Decider(Protocol):
    """What becomes of a model that was found."""

    @property
    def is_lasting(self) -> bool:
        """Whether modules are to be looked at as long as parameters are open."""

    def refuses_compiled(self, model: nn.Module) -> bool:
        """Whether a model that the program has given to `torch.compile` is left to it."""

    def decide(self, model: nn.Module) -> Instead | bool | None:
        """True: it is managed; False or None: it runs here; a function: call that this time, and ask again."""


class Recognition:
    """The trained parameters of a process, and which of its modules use them."""

    def __init__(self, decider: Decider) -> None:
        self.decider = decider
        self.owner = os.getpid()
        self.models = 0  # times that one was looked at
        self.layers = 0  # trained ones that the program calls by themselves
        self._open: dict[int, weakref.ref[Any]] = {}  # trained, and of no model yet
        self._taken: dict[int, weakref.ref[Any]] = {}  # of a model that is managed
        self._settled: dict[int, weakref.ref[nn.Module]] = {}
        self._passing: dict[int, weakref.ref[nn.Module]] = {}  # settled until another optimizer is made
        self._calls = 0
        self._all = False  # whatever learns is trained
        self._optimizers: dict[int, str] = {}  # by parameter

    def given(self, optimizer: Any) -> None:
        """An optimizer has parameters."""
        if os.getpid() != self.owner:
            return
        known = (self._open, self._taken)
        for group in optimizer.param_groups:
            for one in group["params"]:
                if isinstance(one, nn.Parameter) and not any(id(one) in table for table in known):
                    _remember(self._open, one)
                self._optimizers[id(one)] = type(optimizer).__name__
        self._passing.clear()
        self._calls = 0
        if self._open:
            self._watch()

    def take_all(self) -> None:
        """The program trains without an optimizer of torch's: every parameter that learns is trained."""
        self._all = True
        self._watch()

    def meet(self, module: nn.Module) -> Instead | None:
        """A module is called; what to call instead, if anything."""
        key = id(module)
        if key in self._settled or key in self._passing or not torch.is_grad_enabled():
            return None
        if os.getpid() != self.owner or torch.compiler.is_compiling():
            return None
        self._calls += 1
        if self._calls > _PATIENCE and not self.decider.is_lasting:
            self._open.clear()
            self._all = False
            self._unwatch()
            return None
        parameters = list(module.parameters())
        if _is_transformed(parameters):
            return None
        if not any(id(one) in self._open or (self._all and one.requires_grad) for one in parameters):
            _remember(self._passing, module)
            return None
        with PATCH_LOCK:  # another thread may have found it meanwhile
            return None if key in self._settled else self._found(module, parameters)

    def _found(self, module: nn.Module, parameters: list[nn.Parameter]) -> Instead | None:
        if isinstance(module, _PARALLEL):
            return None  # its forward calls the model, which is met then
        dispatch = sys.modules.get("gemini.runtime.interception.dispatch")
        around = dispatch and dispatch.model_around(module)
        if around is not None:  # the program has added a module to it
            self.settle(around, managed=True)
            return None
        if _is_compiled(module):
            return lambda *args, **kwargs: self._compiled(module, args, kwargs)
        is_layer = not any(True for _ in module.children())
        if is_layer or any(id(one) in self._taken for one in parameters):
            self.layers += is_layer
            self.settle(module, managed=False)
            return None
        self.models += 1
        decided = self.decider.decide(module)
        if callable(decided):
            return decided
        self.settle(module, managed=decided is True)
        return lambda *args, **kwargs: nn.Module.__call__(module, *args, **kwargs)

    def _compiled(self, wrapper: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of what `torch.compile` returns: where its model gets workers they run that model as it is written."""
        model: nn.Module = wrapper._modules["_orig_mod"]
        if self.decider.refuses_compiled(model):
            self.settle(wrapper, managed=False)
            return nn.Module.__call__(wrapper, *args, **kwargs)
        instead = self.meet(model)
        if all(id(one) in self._taken for one in model.parameters() if one.requires_grad):
            from gemini.runtime.interception.dispatch import unwrap

            unwrap(wrapper, "_orig_mod")
            return nn.Module.__call__(model, *args, **kwargs)
        if instead is not None and id(model) not in self._settled:  # still looked at
            return instead(*args, **kwargs)
        _remember(self._settled, wrapper)
        return _CALL(wrapper, *args, **kwargs)

    def trained_by(self, model: nn.Module) -> str:
        """The optimizers of a model."""
        found = (self._optimizers.get(id(one)) for one in model.parameters())
        return " and ".join(dict.fromkeys(name for name in found if name)) or "the program itself"

    def call(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of a model in this process, as it would be without us."""
        return _CALL(model, *args, **kwargs)

    def pass_over(self, model: nn.Module) -> None:
        """The modules of a model that is being looked at are not models themselves."""
        for module in model.modules():
            if module is not model:
                _remember(self._passing, module)

    def settle(self, model: nn.Module, managed: bool) -> None:
        """A model has been decided on: its modules are not asked about again."""
        for module in model.modules():
            _remember(self._settled, module)
        for one in model.parameters():
            self._open.pop(id(one), None)
            if managed:
                _remember(self._taken, one)
        if not self._open and not self._all:
            self._unwatch()

    # ── where modules are met ────────────────────────────────────────────────────────────────────────────────────────
    def _watch(self) -> None:
        dispatch = sys.modules.get("gemini.runtime.interception.dispatch")
        with PATCH_LOCK:
            if dispatch is not None and nn.Module.__call__ is dispatch._call:
                dispatch.ask_about_others(self.meet)
            elif nn.Module.__call__ is _CALL:
                nn.Module.__call__ = _watching(self)

    def _unwatch(self) -> None:
        dispatch = sys.modules.get("gemini.runtime.interception.dispatch")
        if dispatch is not None:
            dispatch.ask_about_others(None)
        self.stop_watching()

    def stop_watching(self) -> None:
        """Torch's own call again, where the run time has not put its own there."""
        with PATCH_LOCK:
            if getattr(nn.Module.__call__, "is_recognition", False):
                nn.Module.__call__ = _CALL

    def resume(self) -> None:
        """Watch again what is open."""
        if self._open or self._all:
            self._watch()


def _watching(recognition: Recognition) -> Any:
    settled, meet = recognition._settled, recognition.meet

    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in settled:
            instead = meet(module)
            if instead is not None:
                return instead(*args, **kwargs)
        return _CALL(module, *args, **kwargs)

    __call__.is_recognition = True  # type: ignore[attr-defined]
    return __call__


def _is_transformed(parameters: list[nn.Parameter]) -> bool:
    """Whether a call is one of `torch.func`: others stand in for the parameters, or a transform is going on."""
    if any(not isinstance(one, nn.Parameter) for one in parameters):
        return True
    return bool(torch._C._are_functorch_transforms_active())


def _remember(table: dict[int, weakref.ref[Any]], one: Any) -> None:
    """Ids are reused: an entry leaves with its object."""
    key = id(one)
    table[key] = weakref.ref(one, lambda _: table.pop(key, None))


def _is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has wrapped a model in this module."""
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return frame is not None and isinstance(module, frame.OptimizedModule)


def recognition_for(session: Session, folder: str) -> Recognition:
    """The recognition that a session asks for."""
    from gemini.launcher.policy import decider_for

    decider = decider_for(session, folder)
    recognition = Recognition(decider)
    decider.recognition = recognition
    return recognition
