"""Device placement: replaces absent devices by the managed device, so that a script runs without them.

    x.cuda(), x.to(device), x.pin_memory()       __gemini__.on(x).cuda()      the type of x is known at run time
    torch.zeros(3, device="cuda")                torch.zeros(3, device=__gemini__.device("cuda"))
    torch.device("cuda")                         torch.device(__gemini__.device("cuda"))
    torch.zeros(3, **options)                    torch.zeros(3, **__gemini__.keywords(options))
    torch.load(path)                             torch.load(path, map_location=__gemini__.map_location())
    dist.init_process_group("nccl")              dist.init_process_group(__gemini__.backend("nccl"))
    torch.cuda.synchronize()                     __gemini__.stand_in(torch.cuda.synchronize)()

Where a device exists, each of these does what the script wrote; `gemini.launcher.script_api` has the rules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from gemini.instrument.names.device_names import ACCELERATORS, CUDA_STUBS, DEVICE_KEYWORDS
from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.prefilter import find_mentions, is_inserted, last_word, possible_names
from gemini.instrument.text.edits import Edit

# Methods that move their receiver, whose type the source does not show.
_PLACING_METHODS = ("cuda", "to", "to_empty", "pin_memory")
# Methods of a tensor that create another, with a `device=`.
_FACTORY_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_Routes = Mapping[str | None, str]
# Keyword → the function that routes its value, in calls of PyTorch. None is ``**options``.
_KEYWORDS: _Routes = {None: "keywords", **{name: name for name in DEVICE_KEYWORDS}}
# Keywords of these place nothing: a DataLoader only warns about pin_memory.
_WITHOUT_DEVICES = ("torch.utils.data.", "torch.optim.", "torch.distributed.")
# Calls that take a device by position: name → (position, routing function).
_POSITIONS = {
    "torch.device": (0, "device"),
    "torch.Generator": (0, "device"),
    "torch.set_default_device": (0, "device"),
    "torch.set_default_tensor_type": (0, "tensor_type"),
    "torch.autocast": (0, "device_type"),
    "torch.amp.autocast": (0, "device_type"),
    "torch.amp.autocast_mode.autocast": (0, "device_type"),
    "torch.amp.GradScaler": (0, "device_type"),
    "torch.amp.grad_scaler.GradScaler": (0, "device_type"),
    "torch.load": (1, "map_location"),
    "torch.jit.load": (1, "device"),
    "torch.nn.parallel.DistributedDataParallel": (1, "device_ids"),
    "torch.distributed.init_process_group": (0, "backend"),
}
_PLACED = frozenset(name.rpartition(".")[2] for name in _POSITIONS)
_STUB_NAMES = frozenset(name.rpartition(".")[2] for name in CUDA_STUBS)
# Calls with other keywords; the `device` of a scaler selects its arithmetic.
_OWN_KEYWORDS: dict[str, _Routes] = {
    "torch.jit.load": {"map_location": "device"},  # a device only; functions and dicts raise
    "torch.amp.GradScaler": {"device": "device_type"},
    "torch.amp.grad_scaler.GradScaler": {"device": "device_type"},
    "torch.nn.parallel.DistributedDataParallel": {"device_ids": "device_ids", "output_device": "device_ids"},
    "torch.distributed.init_process_group": {"backend": "backend"},
}
_GAP = re.compile(r"(?:[ \t\f\r\n]|\\\r?\n|#[^\r\n]*)*")  # blanks, line ends and comments
_TYPE_CHECKS = frozenset({"builtins.isinstance", "builtins.issubclass"})
# PyTorch compiles these from their source text, which must not change.
_SCRIPTED = frozenset({"torch.jit.script", "torch.jit.export", "torch.jit.script_method"})


class DevicePlacement(Pass):
    """The pass described above."""

    name = "device-placement"
    description = "route hard-coded devices (.cuda(), .to('cuda:0'), torch.device, device=) to ones that exist"
    # A file may import torch through another module of the user, without its name.
    triggers = ("torch", "cuda", ".to(", "device=", ".pin_memory(", "import *")

    def edits(self, unit: Unit) -> Iterator[Edit]:
        """Route every device in the file."""
        scripted = _find_scripted(unit)
        for edit in (*self._methods(unit), *self._calls(unit), *self._references(unit)):
            if not is_inserted(unit, edit.node) and not _lies_in(unit, edit.node, scripted):
                yield edit

    def _methods(self, unit: Unit) -> Iterator[Edit]:
        for call in unit.methods(*_PLACING_METHODS):
            assert isinstance(call.func, ast.Attribute)
            if _is_torchs(unit, call) or not _may_place(unit, call):
                continue
            yield Edit.wrap(call.func.value, "__gemini__.on(", ")", f".{call.func.attr}() on a device of this machine")
        for call in unit.methods("type"):
            if call.args and _is_text(call.args[0], "torch.cuda."):
                yield _route(call.args[0], "tensor_type")
        for call in unit.methods(*_FACTORY_METHODS):
            yield from self._keywords(unit, call, {"device": "device", None: "keywords"})

    def _calls(self, unit: Unit) -> Iterator[Edit]:
        for call, name in _torch_calls(unit):
            if name == "torch.device" and (len(call.args) > 1 or call.keywords):
                yield _route(call, "device")
                continue
            yield from self._keywords(unit, call, _keywords_of(name))
            position, function = _POSITIONS.get(name, (0, ""))
            if function and len(call.args) > position and not _has_star(call.args[: position + 1]):
                if not _is_plain(unit, call.args[position]):
                    yield _route(call.args[position], function)
            elif function == "map_location" and not _is_given(call, "map_location", position):
                yield _with_keyword(unit, call, "map_location=__gemini__.map_location()")

    def _keywords(self, unit: Unit, call: ast.Call, routes: _Routes) -> Iterator[Edit]:
        for keyword in call.keywords:
            function = routes.get(keyword.arg)
            if function and not _is_plain(unit, keyword.value):
                yield _route(keyword.value, function)

    def _references(self, unit: Unit) -> Iterator[Edit]:
        for node in find_mentions(unit, _STUB_NAMES):
            if unit.resolve(node) in CUDA_STUBS and not _is_only_named(unit, node):
                yield Edit.wrap(node, "__gemini__.stand_in(", ")", "works without CUDA")


def _torch_calls(unit: Unit) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of PyTorch functions that may take a device."""
    spelled = possible_names(unit, _PLACED)
    for call in unit.nodes(ast.Call):
        if last_word(call.func) in spelled or any(keyword.arg in _KEYWORDS for keyword in call.keywords):
            name = unit.resolve(call.func) or ""
            if name.startswith("torch.") or (name == "functools.partial" and _is_of_torchs(unit, call)):
                yield call, name


def _is_of_torchs(unit: Unit, partial: ast.Call) -> bool:
    """Return whether `partial` binds arguments of a PyTorch function that may take a device."""
    name = (unit.resolve(partial.args[0]) or "") if partial.args else ""
    return name.startswith("torch.") and _keywords_of(name) is _KEYWORDS


def _route(value: ast.expr, function: str) -> Edit:
    return Edit.wrap(value, f"__gemini__.{function}(", ")", "a device of this machine")


def _with_keyword(unit: Unit, call: ast.Call, text: str) -> Edit:
    """Add the argument `text` right after the last one and its brackets, before a trailing comma and comments."""
    source, start = unit.source, unit.source.span(call.keywords[-1].value if call.keywords else call.args[-1])[1]
    closing, at = source.span(call)[1] - 1, start
    while (found := _GAP.match(source.text, at)) and found.end() < closing and source.text[found.end()] == ")":
        at = found.end() + 1
    line, column = source.position(at)
    return Edit.insert(line, column, f", {text}", "devices in the file that this machine does not have")


def _keywords_of(name: str) -> _Routes:
    return _OWN_KEYWORDS.get(name) or ({} if name.startswith(_WITHOUT_DEVICES) else _KEYWORDS)


def _is_torchs(unit: Unit, call: ast.Call) -> bool:
    """Return whether the call is of a PyTorch name, not of a method of an object."""
    return (unit.resolve(call.func) or "").startswith("torch.")


def _may_place(unit: Unit, call: ast.Call) -> bool:
    """Return whether a method call may name an absent device."""
    if last_word(call.func) != "to":
        return True
    values = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg in ("device", None))]
    return any(not _is_plain(unit, value) for value in values)


def _is_text(value: ast.expr, *starts: str) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.startswith(starts)


def _is_plain(unit: Unit, value: ast.expr) -> bool:
    """Return whether `value` needs no routing: not a device, or one that every machine has."""
    if isinstance(value, ast.Constant):
        if isinstance(value.value, str):
            return value.value.partition(":")[0] not in ACCELERATORS and not _is_text(value, "torch.cuda.", "nccl")
        return value.value is None or value.value is False or isinstance(value.value, (bytes, float))
    name = unit.resolve(value)
    return name is not None and name.startswith("torch.")  # torch.float16


def _is_given(call: ast.Call, keyword: str, position: int) -> bool:
    """Return whether this call passes, or may pass, the argument."""
    if len(call.args) > position or _has_star(call.args) or not (call.args or call.keywords):
        return True
    return any(each.arg in (keyword, None) for each in call.keywords)


def _has_star(values: list[ast.expr]) -> bool:
    return any(isinstance(value, ast.Starred) for value in values)


def _is_only_named(unit: Unit, node: ast.AST) -> bool:
    """Return whether `node` only identifies a type: in an annotation, `isinstance` or a comparison."""
    below: ast.AST = node
    for around in unit.ancestors(node):
        if isinstance(around, (ast.arg, ast.Compare)):
            return True
        if isinstance(around, ast.AnnAssign):
            return below is around.annotation
        if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return below is around.returns
        if isinstance(around, ast.Call):
            return below is not around.func and unit.resolve(around.func) in _TYPE_CHECKS
        if isinstance(around, ast.stmt):
            return False
        below = around
    return False


def _find_scripted(unit: Unit) -> list[ast.AST]:
    """Return the functions and classes that PyTorch compiles from their text."""
    if "jit" not in unit.text:
        return []
    nodes: list[ast.FunctionDef | ast.ClassDef] = [*unit.nodes(ast.FunctionDef), *unit.nodes(ast.ClassDef)]
    return [node for node in nodes if any(unit.resolve(_decorator(each)) in _SCRIPTED for each in node.decorator_list)]


def _decorator(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node


def _lies_in(unit: Unit, node: ast.AST | None, blocks: list[ast.AST]) -> bool:
    return bool(blocks) and node is not None and any(around in blocks for around in unit.ancestors(node))
