"""Composition: one program of an effect, a place, an access, a route, a position and a way to train."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any, NamedTuple

from tests.programs.impure.accesses import ACCESSES, write_draw
from tests.programs.impure.effects import EFFECTS, FAMILIES, Effect
from tests.programs.impure.places import Place, places_of
from tests.programs.impure.routes import ROUTES, Route
from tests.programs.impure.state_effects import STATE_EFFECTS

IMPORTS = """
import argparse, array, bisect, builtins, collections, contextlib, copy, csv, ctypes, dataclasses, functools, gc, glob
import heapq, io, itertools, json, linecache, logging, math, mmap, multiprocessing, operator, os, pprint, queue, random
import re, socket, sqlite3, sys, threading, time, types, uuid, warnings, weakref
from collections import OrderedDict, defaultdict, deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
"""
MODEL = """
class Clean(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.drop = nn.Linear(6, 6), nn.Dropout({drop})

    def forward(self, x):
        return x + self.drop(torch.tanh(self.lin(x)))


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.enter, self.blocks, self.leave = nn.Linear(9, 6), nn.ModuleList(blocks), nn.Linear(6, 3)

    def forward(self, x{taken}):
        x = self.enter(x)
        for block in self.blocks:
            x = {inner}
        return self.leave(x)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


class Criterion(nn.Module):
    def __init__(self, block=None):
        super().__init__()
        self.block = block

    def forward(self, out, y):
        out = out if self.block is None else self.block(F.pad(out, (0, 3)))[:, :3]
        return F.cross_entropy(out, y)
"""
MAIN = """
def main(manage, record):
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
{make}
    torch.manual_seed(2)
{after}
    manage(model)
    optimizer = torch.optim.{optimizer}
    try:
        for step in range(8):
            given = torch.Generator().manual_seed(step)
            x, y = torch.randn(8, 9, generator=given).double(), torch.randint(3, (8,), generator=given)
{script}
{train}
    finally:
        {restore}
    record.append(("weights", [p.detach().clone() for p in model.parameters()]))
    record.append(("seen", {seen}))
    record.append(("states", torch.get_rng_state(), str(np.random.get_state()), random.getstate()))
"""
_STEP = (
    "optimizer.zero_grad()\nloss = {loss}\nloss.backward()\noptimizer.step()\nrecord.append(('loss', loss.item()))\n"
)
_LOSS = "criterion(model(x{call}), y)"
_PLAIN = _STEP.replace("{loss}", _LOSS)
_EVALUATION = "model.eval()\nwith torch.no_grad():\n    record.append(('evaluated', model(x{call}).sum().item()))\nmodel.train()\n"
TRAININGS = {
    "plain": _PLAIN,
    "accumulation": "optimizer.zero_grad()\nfor part in (slice(0, 4), slice(4, 8)):\n"
    "    loss = criterion(model(x[part]{call}), y[part]) / 2\n    loss.backward()\n    record.append(('loss', loss.item()))\noptimizer.step()\n",
    "evaluation": _PLAIN + _EVALUATION,
    "uneven": "if step % 4 == 3:\n    x, y = x[:5], y[:5]\n" + _PLAIN,
    "twice": _STEP.replace("{loss}", f"{_LOSS} + criterion(model(x.flip(0){{call}}), y)"),
    "autocast off": "with torch.autocast('cpu', enabled=False):\n" + indent(_PLAIN, "    "),
    "read before backward": _PLAIN.replace("loss.backward()", "record.append(('before', float(loss)))\nloss.backward()"),
}  # fmt: skip
# when the effect counts, in the forward of its block
POSITIONS = {
    "first": "True", "middle": "True", "last": "True", "nested": "True", "loss": "True",
    "in evaluation": "not self.training", "every third call": "self.calls % 3 == 0", "late": "self.calls > 5",
    "without gradients": "not torch.is_grad_enabled()", "odd batches": "len(x) % 2",
}  # fmt: skip


class Pieces(NamedTuple):
    """What a program is composed of."""

    effect: Effect
    place: Place
    access: str
    route: Route
    position: str
    training: str


@dataclass(frozen=True)
class Program:
    """The source of one program and of its helper module."""

    name: str
    title: str
    source: str
    helper: str
    schedule: str


def generate(seed: int, family: int, count: int) -> Iterator[Program]:
    """Yield programs of one family, each of another combination of pieces."""
    chance = random.Random(f"{seed} {family}")
    effects = [one for one in (*EFFECTS, *STATE_EFFECTS) if one.family == family]
    decks: list[list[Any]] = [[], [], [], [], [], []]
    tables: tuple[list[Any], ...] = (
        effects, [*places_of(family)], [*ACCESSES], ROUTES, [*POSITIONS], [*TRAININGS],
    )  # fmt: skip
    for number in range(count):
        for deck, table in zip(decks, tables):
            if not deck:
                deck += chance.sample(table, len(table))
        effect, place, access, route, position, training = (deck.pop() for deck in decks)
        if "evaluation" in position or "gradients" in position:
            training = "evaluation"
        elif position == "odd batches":
            training = "uneven"
        if route.call and position == "loss":
            position = "middle"
        name = f"program_{seed}_{family}_{number}"
        yield compose(name, Pieces(effect, place, access, route, position, training), chance)


def compose(name: str, pieces: Pieces, chance: random.Random) -> Program:
    """Return the program of these pieces."""
    effect, place, access, route, position, training = pieces
    helper_name = f"{name}_helper"
    if not effect.make:
        place, access = Place(""), "named"
        pieces = pieces._replace(place=place, access=access)
    title = (
        f"{FAMILIES[effect.family]}: {effect.name} | {place.ref} | {access} | {route.name} | {position} | {training}"
    )
    code, helper = _fill(place.code, effect.make, helper_name), _fill(place.helper, effect.make, helper_name)
    parts = [
        f'"""{title}"""\n'.replace("\\", ""), IMPORTS, f"import {helper_name} as helper\n", effect.code, code,
        write_draw(access, place.ref, effect.lines, effect.value).replace("{helper}", helper_name),
        route.code, _write_block(pieces), _write_model(route, chance),
        _write_main(pieces, chance),
    ]  # fmt: skip
    helper_text = (
        IMPORTS
        + (effect.code if place.helper else "")
        + helper
        + "def pass_on(function, *args):\n    return function(*args)\n"
    )
    source = "\n\n".join(parts).replace("{program}", name).replace("{helper}", helper_name)
    return Program(name, title, source, helper_text, chance.choice(("auto", "auto", "auto", "none")))


def _fill(text: str, make: str, helper: str) -> str:
    return text.replace("{make}", make).replace("{helper}", helper)


def _write_block(pieces: Pieces) -> str:
    effect, place, route, position = pieces.effect, pieces.place, pieces.route, pieces.position
    bases, body = route.bases, _fill(place.body, effect.make, "")
    if body == "BASES = Mixin":
        bases, body = f"Mixin, {bases}", ""
    init = "\n".join([_fill(place.init, effect.make, ""), route.init])
    counts = "self.calls" in "".join((POSITIONS[position], effect.lines, effect.value))
    lines = [
        f"        x = x + torch.tanh(self.lin(x)){'; self.calls += 1' if counts else ''}",
        f"        if {POSITIONS[position]}:",
        indent(route.lines, " " * 12),
        "            x = x * (1 + 0.1 * value)",
        "        return x",
    ]
    taken = ", callback" if route.mode == "callback" else ""
    return "\n".join(
        [
            "@with_draw" if route.mode == "class with_draw" else "",
            f"class Block({bases}):",
            "    def __init__(self):",
            "        super().__init__()",
            "        self.lin, self.calls = nn.Linear(6, 6), 0",
            indent(init, " " * 8),
            indent(body, "    "),
            indent(route.body, "    "),
            "    @with_draw" if route.mode == "with_draw" else "",
            f"    def forward(self, x{taken}):",
            *lines,
        ]
    )


def _write_model(route: Route, chance: random.Random) -> str:
    is_called = route.mode == "callback"
    inner = "block(x, callback) if isinstance(block, Block) else block(x)" if is_called else "block(x)"
    drop = chance.choice(("0.0", "0.1"))
    return MODEL.format(drop=drop, taken=", callback=None" if is_called else "", inner=inner)


def _write_main(pieces: Pieces, chance: random.Random) -> str:
    effect, place, _, route, position, training = pieces
    if position == "loss":
        blocks = "Clean(), Clean(), Clean()"
    else:
        at = {"first": 0, "middle": 1, "last": 2}.get(position, chance.randrange(3))
        blocks = ", ".join("block" if n == at else "Clean()" for n in range(3))
    wrap = "Wrapper(model)" if position == "nested" else "model"
    make = (
        f"block = Block().double()\nmodel = Model([{blocks}]).double()\nmodel = {wrap}\n"
        f"criterion = Criterion({'block.requires_grad_(False)' if position == 'loss' else ''})"
    )
    call = f", {route.call}" if route.call and position != "loss" else ""
    script = effect.script.replace("{o}", place.outside)
    return (
        MAIN.replace("{make}", indent(make, "    "))
        .replace("{after}", indent(route.after, "    "))
        .replace("{optimizer}", chance.choice(("SGD(model.parameters(), 0.1)", "AdamW(model.parameters(), 0.01)")))
        .replace("{script}", indent(script, " " * 12))
        .replace("{train}", indent(TRAININGS[training].replace("{call}", call), " " * 12))
        .replace("{restore}", route.restore or "pass")
        .replace("{seen}", effect.seen.replace("{o}", place.outside) or "None")
    )


def compose_pieces(name: str, title: str, effect: Effect, route: Route) -> Program:
    """Return a program with the effect in the middle block, trained plainly by a schedule that is found."""
    made = compose(name, Pieces(effect, Place(""), "named", route, "middle", "plain"), random.Random(name))
    return replace(made, title=title, schedule="auto")
