"""Places: where the object of an effect lives. `{make}` creates it; `ref` is how a method of the block names it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One place: definitions before the classes, lines of `__init__` and the body of the block, the helper module."""

    ref: str
    code: str = ""
    init: str = ""
    body: str = ""
    helper: str = ""

    @property
    def is_own(self) -> bool:
        return self.ref.startswith("self.")

    @property
    def outside(self) -> str:
        """How the training loop names the object."""
        return self.ref.replace("self.", "block.", 1) if self.is_own else self.ref


_BOX = "class Box:\n    pass\n"
_OWN = (
    Place("self.thing", init="self.thing = {make}"),
    Place("self.box.thing", _BOX, "self.box = Box()\nself.box.thing = {make}"),
    Place("self.box.thing", init="self.box = types.SimpleNamespace(thing={make})"),
    Place("self.things[0]", init="self.things = [{make}]"),
    Place("self.things['a']", init="self.things = {'a': {make}}"),
    Place("self.pair[1]", init="self.pair = (1, {make})"),
    Place("self.lin.thing", init="self.lin.thing = {make}"),
    Place("self.lin.weight.thing", init="self.lin.weight.thing = {make}"),
    Place("self.thing", init="object.__setattr__(self, 'thing', {make})"),
    Place("self.deep.thing", init="self.deep = nn.Identity()\nself.deep.thing = {make}"),
    Place("self.more[0].thing", init="self.more = nn.ModuleList([nn.Identity()])\nself.more[0].thing = {make}"),
    Place("self.more.thing", init="self.more = nn.ParameterDict()\nself.more.thing = {make}"),
    Place("self.held.thing", init="self.register_buffer('held', torch.zeros(1))\nself.held.thing = {make}"),
    Place("self.get()", init="made = {make}\nself.get = lambda: made"),
    Place("self.get()", init="self.get = functools.partial(lambda one: one, {make})"),
    Place("self.get()", init="self.thing_ = {make}", body="def get(self):\n    return self.thing_"),
    Place("self.thing", init="self.thing_ = {make}", body="@property\ndef thing(self):\n    return self.thing_"),
    Place("self.thing", init="self._thing = {make}",
          body="def __getattr__(self, name):\n    return self.__dict__['_thing'] if name == 'thing' else super().__getattr__(name)"),
    Place("self.thing", body="@functools.cached_property\ndef thing(self):\n    return {make}"),
    Place("self.box.thing", "class Box:\n    __slots__ = ('thing',)\n", "self.box = Box()\nself.box.thing = {make}"),
    Place("self.box.thing", "@dataclass\nclass Box:\n    thing: Any = field(default_factory=lambda: {make})\n", "self.box = Box()"),
    Place("self.box.thing", "class Box(NamedTuple):\n    thing: Any\n", "self.box = Box({make})"),
    Place("self.held['a']", init="self.held = collections.UserDict(a={make})"),
    Place("self.held['a']", init="self.held = collections.ChainMap({}, {'a': {make}})"),
    Place("self.held['a']", init="self.held = types.MappingProxyType({'a': {make}})"),
    Place("self.config.thing", init="self.config = torch.nn.utils.rnn.PackedSequence(torch.zeros(1), torch.ones(1))\n"
          "self.config = types.SimpleNamespace(thing={make}, inner=self.config)"),
    Place("self.size.thing", "class Size(int):\n    pass\n", "self.size = Size(3)\nself.size.thing = {make}"),
    Place("self.hyper.thing", init="self.hyper = argparse.Namespace(thing={make})"),
    Place("self.thing", body="thing = {make}"),
    Place("self.thing", "class Mixin:\n    thing = {make}\n", body="BASES = Mixin"),
    Place("self.thing", "class Describes:\n    def __init__(self, one):\n        self.one = one\n    def __get__(self, owner, kind):\n"
          "        return self.one\n", body="thing = Describes({make})"),
)  # fmt: skip
_GLOBAL = (
    Place("thing", "thing = {make}\n"),
    Place("things['a']", "things = {'a': {make}}\n"),
    Place("things[0]", "things = [{make}]\n"),
    Place("things[0][1]", "things = ((1, {make}),)\n"),
    Place("place.inner.thing", "place = types.SimpleNamespace(inner=types.SimpleNamespace(thing={make}))\n"),
    Place("Holder.thing", "class Holder:\n    thing = {make}\n"),
    Place("Heir.thing", "class Holder:\n    thing = {make}\nclass Heir(Holder):\n    pass\n"),
    Place("Heir().thing", "class Holder:\n    thing = {make}\nclass Heir(Holder):\n    pass\n"),
    Place("Heir.thing", "class Meta(type):\n    thing = {make}\nclass Heir(metaclass=Meta):\n    pass\n"),
    Place("held.thing", "class Holder:\n    def __init__(self):\n        self.thing = {make}\nheld = Holder()\n"),
    Place("held.thing", "class Holder:\n    __slots__ = ('thing',)\nheld = Holder()\nheld.thing = {make}\n"),
    Place("held.thing", "class Holder:\n    def __init__(self):\n        self.hidden = {make}\n    @property\n    def thing(self):\n"
          "        return self.hidden\nheld = Holder()\n"),
    Place("held.thing", "class Holder:\n    def __getattr__(self, name):\n        return hidden[name]\nhidden = {'thing': {make}}\nheld = Holder()\n"),
    Place("held()", "class Holder:\n    def __init__(self):\n        self.hidden = {make}\n    def __call__(self):\n"
          "        return self.hidden\nheld = Holder()\n"),
    Place("held['a']", "class Holder:\n    def __init__(self):\n        self.hidden = {make}\n    def __getitem__(self, key):\n"
          "        return self.hidden\nheld = Holder()\n"),
    Place("held['a']", "class Holder(dict):\n    hidden = {make}\n    def __missing__(self, key):\n        return self.hidden\nheld = Holder()\n"),
    Place("holder.thing", "def holder():\n    pass\nholder.thing = {make}\n"),
    Place("get()", "def get(thing={make}):\n    return thing\n"),
    Place("get()", "def get(*, thing={make}):\n    return thing\n"),
    Place("get()", "def around():\n    thing = {make}\n    def get():\n        return thing\n    return get\nget = around()\n"),
    Place("get()", "def around():\n    things = [{make}]\n    return lambda: things[0]\nget = around()\n"),
    Place("get()", "get = functools.partial(lambda thing: thing, {make})\n"),
    Place("get()", "get = functools.partial(getattr, types.SimpleNamespace(thing={make}), 'thing')\n"),
    Place("get()", "@functools.lru_cache\ndef get():\n    return {make}\n"),
    Place("get()", "kept = []\ndef get():\n    if not kept:\n        kept.append({make})\n    return kept[0]\n"),
    Place("get()", "@functools.singledispatch\ndef choose(x):\n    return None\nhidden = {make}\n@choose.register\ndef _(x: int):\n    return hidden\n"
          "def get():\n    return choose(3)\n"),
    Place("Kind.A.value[0]", "class Kind(Enum):\n    A = types.SimpleNamespace(thing={make})\n".replace("types.SimpleNamespace(thing={make})", "[{make}]")),
    Place("Kind.A.get()", "class Kind(Enum):\n    A = 1\n    def get(self):\n        return hidden\nhidden = {make}\n"),
    Place("Kind.A.thing", "class Kind(Enum):\n    A = 1\nKind.A.thing = {make}\n"),
    Place("level.get()", "level = ContextVar('level', default={make})\n"),
    Place("local.thing", "local = threading.local()\nlocal.thing = {make}\n"),
    Place("held['a']", "held = collections.UserDict(a={make})\n"),
    Place("held['a']", "held = collections.ChainMap({'a': {make}})\n"),
    Place("held[0]", "held = collections.UserList([{make}])\n"),
    Place("held['a']", "held = collections.OrderedDict(a={make})\n"),
    Place("weak().thing", "class Holder:\n    pass\nheld = Holder()\nheld.thing = {make}\nweak = weakref.ref(held)\n"),
    Place("F.made_thing", "F.made_thing = {make}\n"),
    Place("math.made_thing", "math.made_thing = {make}\n"),
    Place("torch.Tensor.made_thing", "torch.Tensor.made_thing = {make}\n"),
    Place("nn.Linear.made_thing", "nn.Linear.made_thing = {make}\n"),
    Place("made_thing", "builtins.made_thing = {make}\n"),
    Place("shift.thing", "shift = torch.zeros(1)\nshift.thing = {make}\n"),
    Place("number.thing", "class Number(float):\n    pass\nnumber = Number(1)\nnumber.thing = {make}\n"),
    Place("helper.thing", helper="thing = {make}\n"),
    Place("helper.things['a']", helper="things = {'a': {make}}\n"),
    Place("helper.get()", helper="thing = {make}\ndef get():\n    return thing\n"),
    Place("helper.thing", helper="hidden = {make}\ndef __getattr__(name):\n    if name == 'thing':\n        return hidden\n    raise AttributeError(name)\n"),
    Place("helper.Holder().thing", helper="class Holder:\n    thing = {make}\n"),
    Place("from_helper", "from {helper} import thing as from_helper\n", helper="thing = {make}\n"),
    Place("sys.modules['{helper}'].thing", helper="thing = {make}\n"),
    Place("getattr(helper, 'thi' + 'ng')", helper="thing = {make}\n"),
    Place("globals()['thing']", "thing = {make}\n"),
    Place("vars(held)['thing']", "held = types.SimpleNamespace(thing={make})\n"),
    Place("operator.attrgetter('thing')(held)", "held = types.SimpleNamespace(thing={make})\n"),
    Place("getter(held)", "getter = operator.attrgetter('thing')\nheld = types.SimpleNamespace(thing={make})\n"),
    Place("getter(held)", "getter = operator.itemgetter('a')\nheld = {'a': {make}}\n"),
)  # fmt: skip
PLACES = (*_OWN, *_GLOBAL)
_FAMILY_PLACES = {1: _OWN, 2: _GLOBAL}


def places_of(family: int) -> tuple[Place, ...]:
    """Return the places in which objects of a family may live."""
    return _FAMILY_PLACES.get(family, PLACES)
