"""Accesses: the function `draw(self, x)` of an effect, which gets at its object in one of several ways."""

from __future__ import annotations

from textwrap import indent

# `{ref}` names the object. The lines of the effect use `o`, which every access binds.
_USE = "def use(o, x, self=None):\n{body}\n"
_ACCESSES = {
    "named": "",
    "alias": "def draw(self, x):\n    o = {ref}\n{body}\n",
    "pair": "def draw(self, x):\n    o, _ = {ref}, 1\n{body}\n",
    "walrus": "def draw(self, x):\n    if (o := {ref}) is None:\n        return 0\n{body}\n",
    "argument": _USE + "def draw(self, x):\n    return use({ref}, x, self)\n",
    "keyword": _USE + "def draw(self, x):\n    return use(self=self, o={ref}, x=x)\n",
    "starred": _USE + "def draw(self, x):\n    return use(*[{ref}, x], self=self)\n",
    "lambda": _USE + "def draw(self, x):\n    return (lambda o: use(o, x, self))({ref})\n",
    "comprehension": _USE + "def draw(self, x):\n    return [use(o, x, self) for o in ({ref},)][0]\n",
    "map": _USE + "def draw(self, x):\n    return next(map(lambda o: use(o, x, self), [{ref}]))\n",
    "loop": "def draw(self, x):\n    for o in [{ref}]:\n        pass\n{body}\n",
    "with": "def draw(self, x):\n    with contextlib.nullcontext({ref}) as o:\n        pass\n{body}\n",
    "inner": "def draw(self, x):\n    o = {ref}\n    def inner():\n{inner}\n    return inner()\n",
    "found": "def find(self):\n    return {ref}\ndef draw(self, x):\n    o = find(self)\n{body}\n",
    "dictionary": "def draw(self, x):\n    o = {{'o': {ref}}}.get('o')\n{body}\n",
    "list": "def draw(self, x):\n    lent = []\n    lent.append({ref})\n    o = lent.pop()\n{body}\n",
    "object": (
        "class Uses:\n    def __init__(self, o):\n        self.o = o\n    def use(self, block, x):\n        self, o = block, self.o\n{inner}\n"
        "def draw(self, x):\n    return Uses({ref}).use(self, x)\n"
    ),
    "tensor": "def draw(self, x):\n    x.carried = {ref}\n    o = x.carried\n{body}\n",
    "error": "def draw(self, x):\n    try:\n        raise KeyError({ref})\n    except KeyError as error:\n        o = error.args[0]\n{body}\n",
    "generator": "def give(self):\n    yield {ref}\ndef draw(self, x):\n    for o in give(self):\n        break\n{body}\n",
    "or": "def draw(self, x):\n    o = None or {ref}\n    assert o is not None\n{body}\n",
    "attribute": "def draw(self, x):\n    self.lent = {ref}\n    o = self.lent\n{body}\n",
    "default": "def draw(self, x):\n    def take(o={ref}):\n        return o\n    o = take()\n{body}\n",
    "partial": _USE + "def draw(self, x):\n    return functools.partial(use, {ref})(x, self)\n",
    "match": "def draw(self, x):\n    o = max([{ref}], key=lambda one: 0)\n{body}\n",
    "reduce": _USE + "def draw(self, x):\n    return functools.reduce(lambda at, o: use(o, x, self), [{ref}], 0)\n",
}  # fmt: skip
ACCESSES = tuple(_ACCESSES)


def write_draw(access: str, ref: str, lines: str, value: str) -> str:
    """Return the function `draw`; `lines` and `value` have `{o}` for the object."""
    name = ref if access == "named" else "o"
    statements = [*lines.replace("{o}", name).splitlines(), f"return {value.replace('{o}', name)}"]
    body = "\n".join(statements)
    if access == "named":
        return f"def draw(self, x):\n{indent(body, '    ')}\n"
    text = _ACCESSES[access].replace("{{", "{").replace("}}", "}")
    text = text.replace("{body}", indent(body, "    ")).replace("{inner}", indent(body, "        "))
    return text.replace("{ref}", ref)
