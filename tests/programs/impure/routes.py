"""Routes: how the forward of a block gets to `draw(self, x)`, which is a function of the module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """One route. `lines` of the forward set `value`; `after` runs in the script when `block` and `model` exist."""

    name: str
    lines: str = "value = draw(self, x)"
    code: str = ""
    init: str = ""
    body: str = ""
    after: str = ""
    restore: str = ""
    call: str = ""  # more arguments of every call of the model
    bases: str = "nn.Module"
    mode: str = ""  # "hook": the block's forward does not name it


def _special(name: str, method: str, use: str) -> Route:
    """Return a route through a special method of an object, which holds the block and its input."""
    code = (
        "class Special:\n    def __init__(self, block, x):\n        self.block, self.x = block, x\n"
        f"    def {method}:\n        drawn = draw(self.block, self.x)\n        return {_RESULTS.get(name, 'drawn')}\n"
    )
    return Route(name, f"made = Special(self, x)\n{use}", code)


_RESULTS = {
    "__len__": "int(drawn) + 2 if isinstance(drawn, (int, float)) else 3", "__bool__": "float(torch.as_tensor(drawn).sum()) > 0.7",
    "__str__": "str(float(torch.as_tensor(drawn).sum()))", "__format__": "str(float(torch.as_tensor(drawn).sum()))",
    "__repr__": "str(float(torch.as_tensor(drawn).sum()))", "__contains__": "float(torch.as_tensor(drawn).sum()) > 0.7",
    "__lt__": "float(torch.as_tensor(drawn).sum()) > 0.7", "__eq__": "float(torch.as_tensor(drawn).sum()) > 0.7",
    "__hash__": "hash(float(torch.as_tensor(drawn).sum()))", "__float__": "float(torch.as_tensor(drawn).sum())",
    "__index__": "int(torch.as_tensor(drawn).sum())", "__int__": "int(torch.as_tensor(drawn).sum())",
    "__iter__": "iter([drawn])", "__reversed__": "iter([drawn])", "__exit__": "setattr(self, 'drawn', drawn)",
    "__del__": "drawn", "__bytes__": "bytes(int(torch.as_tensor(drawn).sum()) % 7)",
}  # fmt: skip
_SPECIAL = (
    ("__len__", "__len__(self)", "value = len(made)"), ("__bool__", "__bool__(self)", "value = 1.0 if made else 2.0"),
    ("__str__", "__str__(self)", "value = float(str(made))"), ("__format__", "__format__(self, how)", "value = float(f'{made}')"),
    ("__repr__", "__repr__(self)", "value = float(f'{made!r}')"), ("__contains__", "__contains__(self, one)", "value = float(3 in made)"),
    ("__lt__", "__lt__(self, other)", "value = float(made < 3)"), ("__lt__", "__lt__(self, other)", "value = float(min([made, Special(self, x)]) is made)"),
    ("__eq__", "__eq__(self, other)", "value = float(made == 3)"), ("__eq__", "__eq__(self, other)", "value = float(made in [1, 2])"),
    ("__hash__", "__hash__(self)", "value = float(hash(made)) % 5"), ("__float__", "__float__(self)", "value = float(made)"),
    ("__index__", "__index__(self)", "value = [*range(99)][made]"), ("__int__", "__int__(self)", "value = int(made)"),
    ("__iter__", "__iter__(self)", "value = [*made][0]"), ("__iter__", "__iter__(self)", "(value,) = made"),
    ("__reversed__", "__reversed__(self)", "value = next(reversed(made))"), ("__abs__", "__abs__(self)", "value = abs(made)"),
    ("__round__", "__round__(self, n=0)", "value = round(made)"), ("__neg__", "__neg__(self)", "value = -made"),
    ("__pos__", "__pos__(self)", "value = +made"), ("__invert__", "__invert__(self)", "value = ~made"),
    ("__add__", "__add__(self, other)", "value = made + 1"), ("__radd__", "__radd__(self, other)", "value = 1 + made"),
    ("__rmul__", "__rmul__(self, other)", "value = 2 * made"), ("__and__", "__and__(self, other)", "value = made & 1"),
    ("__or__", "__or__(self, other)", "value = made | 1"), ("__xor__", "__xor__(self, other)", "value = made ^ 1"),
    ("__mod__", "__mod__(self, other)", "value = made % 3"), ("__floordiv__", "__floordiv__(self, other)", "value = made // 2"),
    ("__lshift__", "__lshift__(self, other)", "value = made << 2"), ("__divmod__", "__divmod__(self, other)", "value = divmod(made, 2)"),
    ("__iadd__", "__iadd__(self, other)", "made += 1\nvalue = made"), ("__imul__", "__imul__(self, other)", "made *= 1\nvalue = made"),
    ("__getitem__", "__getitem__(self, key)", "value = made[0]"), ("__call__", "__call__(self)", "value = made()"),
    ("__getattr__", "__getattr__(self, name)", "value = made.level"), ("__getattribute__", "__getattribute__(self, name)", "pass"),
    ("__enter__", "__enter__(self)", "pass"), ("__missing__", "__missing__(self, key)", "pass"),
    ("__del__", "__del__(self)", "del made\nvalue = 0.5"), ("__bytes__", "__bytes__(self)", "value = len(bytes(made))"),
    ("__next__", "__next__(self)", "value = next(made)"), ("__dir__", "__dir__(self)", "pass"),
    ("__class_getitem__", "__class_getitem__(kind, key)", "pass"), ("__copy__", "__copy__(self)", "value = copy.copy(made)"),
    ("__deepcopy__", "__deepcopy__(self, memo)", "value = copy.deepcopy(made)"), ("__trunc__", "__trunc__(self)", "value = math.trunc(made)"),
    ("__ceil__", "__ceil__(self)", "value = math.ceil(made)"), ("__pow__", "__pow__(self, other)", "value = made ** 2"),
    ("__matmul__", "__matmul__(self, other)", "value = made @ 2"), ("__sub__", "__sub__(self, other)", "value = made - 2"),
)  # fmt: skip
_OBJECT = "class Drawer:\n    scale = 1.0\n    def draw(self, block, x):\n        return draw(block, x) * self.scale\ndrawer = Drawer()\n"
_SCALE = "value = 0.0"

ROUTES = [
    Route("inline", "value = draw(self, x)"),
    Route("local name", "function = draw\nvalue = function(self, x)"),
    Route("lambda", "value = (lambda: draw(self, x))()"),
    Route("global lambda", "value = short(self, x)", "short = lambda block, x: draw(block, x)\n"),
    Route("table", "value = table['draw'](self, x)", "table = {'draw': draw, 'other': torch.relu}\n"),
    Route("computed table", "value = table[len(x.shape) - 2](self, x)", "table = [draw, torch.relu]\n"),
    Route("partial", "value = part(x=x)(self)", "def part(x):\n    return functools.partial(draw, x=x)\n"),
    Route("global partial", "value = part(self, x)", "part = functools.partial(draw)\n"),
    Route("wrapped", "value = pure(self, x)",
          "def with_draw(function):\n    @functools.wraps(function)\n    def inner(block, x):\n        return function(block, x) + draw(block, x)\n"
          "    return inner\n@with_draw\ndef pure(block, x):\n    return 1.0\n"),
    Route("decorated forward", "value = 0.0",
          "def with_draw(forward):\n    @functools.wraps(forward)\n    def inner(self, x):\n        return forward(self, x) * (1 + 0.1 * draw(self, x))\n    return inner\n",
          mode="with_draw"),
    Route("class decorator", "value = self.drawn(x)",
          "def with_draw(kind):\n    kind.drawn = lambda self, x: draw(self, x)\n    return kind\n", mode="class with_draw"),
    Route("static method", "value = self.stat(self, x)", body="@staticmethod\ndef stat(block, x):\n    return draw(block, x)"),
    Route("class method", "value = self.by_class(self, x)", body="@classmethod\ndef by_class(cls, block, x):\n    return draw(block, x)"),
    Route("property", "self.x_ = x\nvalue = self.level", body="@property\ndef level(self):\n    return draw(self, self.x_)"),
    Route("property object", "self.x_ = x\nvalue = self.level", body="level = property(lambda self: draw(self, self.x_))"),
    Route("method", "value = self.drawn(x)", body="drawn = draw"),
    Route("method by string", "value = getattr(self, 'drawn')(x)", body="drawn = draw"),
    Route("method by computed string", "value = getattr(self, 'dra' + 'wn')(x)", body="drawn = draw"),
    Route("method caller", "value = operator.methodcaller('drawn', x)(self)", body="drawn = draw"),
    Route("method of the type", "value = type(self).drawn(self, x)", body="drawn = draw"),
    Route("class table", "value = vars(type(self))['drawn'](self, x)", body="drawn = draw"),
    Route("partial method", "value = self.drawn(x)", body="def drawn_(self, extra, x):\n    return draw(self, x)\ndrawn = functools.partialmethod(drawn_, None)"),
    Route("inherited", "value = self.drawn(x)", "class Base(nn.Module):\n    def drawn(self, x):\n        return draw(self, x)\n", bases="Base"),
    Route("super", "value = super().drawn(x)", "class Base(nn.Module):\n    def drawn(self, x):\n        return draw(self, x)\n", bases="Base", body="def drawn(self, x):\n    return 0.0"),
    Route("overridden", "value = self.outer(x)", "class Base(nn.Module):\n    def outer(self, x):\n        return self.drawn(x)\n    def drawn(self, x):\n        return 0.0\n",
          bases="Base", body="def drawn(self, x):\n    return draw(self, x)"),
    Route("mixin", "value = self.drawn(x)", "class Mixed:\n    def drawn(self, x):\n        return draw(self, x)\n", bases="Mixed, nn.Module"),
    Route("attribute", "value = self.function(self, x)", init="self.function = draw"),
    Route("attribute list", "value = [f(self, x) for f in self.functions][0]", init="self.functions = [draw]"),
    Route("attribute partial", "value = self.function(x)", init="self.function = functools.partial(draw, self)"),
    Route("attribute method", "value = self.function(self, x)", _OBJECT, "self.function = drawer.draw"),
    Route("callable object", "value = drawer(self, x)", "class Drawer:\n    def __call__(self, block, x):\n        return draw(block, x)\ndrawer = Drawer()\n"),
    Route("own callable", "value = self.drawer(self, x)", "class Drawer:\n    def __call__(self, block, x):\n        return draw(block, x)\n", "self.drawer = Drawer()"),
    Route("bound method", "value = function(self, x)", _OBJECT + "function = drawer.draw\n"),
    Route("made object", "value = Drawer().draw(self, x)", _OBJECT),
    Route("set on the object", "value = drawer.other(self, x)", _OBJECT + "drawer.other = draw\n"),
    Route("set on the class", "value = drawer.other(self, x)", _OBJECT + "Drawer.other = lambda one, block, x: draw(block, x)\n"),
    Route("constructor", "value = Made(self, x).value", "class Made:\n    def __init__(self, block, x):\n        self.value = draw(block, x)\n"),
    Route("new", "value = Made(self, x).value", "class Made:\n    def __new__(cls, block, x):\n        made = super().__new__(cls)\n        made.value = draw(block, x)\n        return made\n"),
    Route("post init", "value = Made(self, x).value", "@dataclass\nclass Made:\n    block: Any\n    x: Any\n    def __post_init__(self):\n        self.value = draw(self.block, self.x)\n"),
    Route("field factory", "value = Made().value", "@dataclass\nclass Made:\n    value: Any = field(default_factory=lambda: draw(kept[0], torch.zeros(2, 6)))\nkept = []\n", after="kept.append(block)"),
    Route("metaclass call", "value = Made(self, x)", "class Meta(type):\n    def __call__(cls, block, x):\n        return draw(block, x)\nclass Made(metaclass=Meta):\n    pass\n"),
    Route("instance check", "value = float(isinstance((self, x), Made))",
          "class Meta(type):\n    def __instancecheck__(cls, pair):\n        return float(torch.as_tensor(draw(*pair)).sum()) > 0.7\nclass Made(metaclass=Meta):\n    pass\n"),
    Route("subclass hook", "value = type('Made', (Base,), {'block': self, 'x': x}).value",
          "class Base:\n    def __init_subclass__(cls):\n        cls.value = draw(cls.block, cls.x)\n"),
    Route("descriptor", "self.x_ = x\nvalue = self.level", "class Level:\n    def __get__(self, block, kind):\n        return draw(block, block.x_)\n", body="level = Level()"),
    Route("descriptor write", "self.level = x\nvalue = self.value_", "class Level:\n    def __set__(self, block, x):\n        block.value_ = draw(block, x)\n", body="level = Level()"),
    Route("attribute hook", "self.x_ = x\nvalue = self.level", body="def __getattr__(self, name):\n    return draw(self, self.__dict__['x_']) if name == 'level' else super().__getattr__(name)"),
    Route("write hook", "self.level = x\nvalue = self.value_",
          body="def __setattr__(self, name, value):\n    super().__setattr__(name, value)\n    if name == 'level':\n        super().__setattr__('value_', draw(self, value))"),
    Route("own call", "value = 0.0", body="def __call__(self, x):\n    return super().__call__(x) * (1 + 0.1 * draw(self, x))"),
    Route("single dispatch", "value = choose(x, self)", "@functools.singledispatch\ndef choose(x, block):\n    return 0.0\n@choose.register(torch.Tensor)\ndef _(x, block):\n    return draw(block, x)\n"),
    Route("dispatch method", "value = self.choose(x)", body="@functools.singledispatchmethod\ndef choose(self, x):\n    return 0.0\n@choose.register(torch.Tensor)\ndef _(self, x):\n    return draw(self, x)"),
    Route("enumeration", "value = Kind.A.draw(self, x)", "class Kind(Enum):\n    A = 1\n    def draw(self, block, x):\n        return draw(block, x)\n"),
    Route("own enumeration", "value = self.kind.draw(self, x)", "class Kind(Enum):\n    A = 1\n    def draw(self, block, x):\n        return draw(block, x)\n", "self.kind = Kind.A"),
    Route("called enumeration", "value = self.kind(self, x)", "class Kind(Enum):\n    A = 1\n    def __call__(self, block, x):\n        return draw(block, x)\n", "self.kind = Kind.A"),
    Route("value of an enumeration", "value = Kind.A.value(self, x)", "class Kind(Enum):\n    A = functools.partial(draw)\n"),
    Route("text subclass", "value = name.draw(self, x)", "class Name(str):\n    def draw(self, block, x):\n        return draw(block, x)\nname = Name('a')\n"),
    Route("number subclass", "value = self.level.draw(self, x)", "class Level(float):\n    def draw(self, block, x):\n        return draw(block, x)\n", "self.level = Level(1)"),
    Route("tuple subclass", "value = self.pair.draw(self, x)", "class Pair(NamedTuple):\n    a: int\n    def draw(self, block, x):\n        return draw(block, x)\n", "self.pair = Pair(1)"),
    Route("dict subclass", "value = config['draw']", "class Config(dict):\n    def __getitem__(self, key):\n        return draw(kept[0], torch.zeros(2, 6))\nconfig, kept = Config(), []\n", after="kept.append(block)"),
    Route("missing key", "value = Config()[0]", "class Config(dict):\n    def __missing__(self, key):\n        return draw(kept[0], torch.zeros(2, 6))\nkept = []\n", after="kept.append(block)"),
    Route("default dictionary", "value = defaultdict(lambda: draw(self, x))['a']"),
    Route("global default dictionary", "value = made['a']\nmade.clear()", "kept = []\nmade = defaultdict(lambda: draw(kept[0], torch.zeros(2, 6)))\n", after="kept.append(block)"),
    Route("context class", "with Drawn(self, x) as value:\n    pass", "class Drawn:\n    def __init__(self, block, x):\n        self.pair = block, x\n    def __enter__(self):\n        return draw(*self.pair)\n    def __exit__(self, *error):\n        pass\n"),
    Route("context manager", "with drawn(self, x) as value:\n    pass", "@contextlib.contextmanager\ndef drawn(block, x):\n    yield draw(block, x)\n"),
    Route("context decorator", "value = inner(self, x)", "@contextlib.contextmanager\ndef drawn():\n    kept[:] = [draw(kept[-1], torch.zeros(2, 6)), kept[-1]]\n    yield\n@drawn()\ndef inner(block, x):\n    return kept[0]\nkept = []\n", after="kept.append(block)"),
    Route("exit stack", "with contextlib.ExitStack() as stack:\n    stack.callback(draw, self, x)\nvalue = 0.5"),
    Route("generator function", "value = [*drawn(self, x)][0]", "def drawn(block, x):\n    yield draw(block, x)\n"),
    Route("map", "value = [*map(draw, [self], [x])][0]"),
    Route("star map", "value = [*itertools.starmap(draw, [(self, x)])][0]"),
    Route("sorted", "value = len(sorted([1, 2], key=lambda one: draw(self, x) if one == 1 else 0)) * 0.1", mode="plain"),
    Route("filter", "value = len([*filter(lambda one: draw(self, x) is not None, [1])])"),
    Route("substitution", "value = len(re.sub('a', lambda found: str(draw(self, x))[:1], 'banana'))"),
    Route("callable iterator", "value = next(iter(lambda: draw(self, x), None))"),
    Route("reduce", "value = functools.reduce(lambda one, other: draw(self, x), [1, 2])"),
    Route("numpy vectorized", "value = float(np.vectorize(lambda one: float(torch.as_tensor(draw(self, x)).sum()), otypes=[float])(np.zeros(1))[0])"),
    Route("numpy along axis", "value = float(np.apply_along_axis(lambda one: float(torch.as_tensor(draw(self, x)).sum()), 0, np.zeros(1)))"),
    Route("helper", "value = helper.pass_on(draw, self, x)", mode="helper"),
    Route("callback", "value = callback(self, x)", call="draw", mode="callback"),
    Route("callback object", "value = callback.draw(self, x)", _OBJECT, call="drawer", mode="callback"),
    Route("callback dictionary", "value = callback['draw'](self, x)", call="{'draw': draw}", mode="callback"),
    Route("callback partial", "value = callback(self, x)", call="functools.partial(draw)", mode="callback"),
    Route("callback lambda", "value = callback(self, x)", call="lambda block, x: draw(block, x)", mode="callback"),
    Route("hook", _SCALE, after="block.register_forward_hook(lambda m, args, out: out * (1 + 0.1 * draw(m, args[0])))"),
    Route("hook method", _SCALE, _OBJECT, after="block.lin.register_forward_hook(lambda m, args, out: out * (1 + 0.1 * drawer.draw(block, args[0])))"),
    Route("pre-hook", _SCALE, after="block.register_forward_pre_hook(lambda m, args: (args[0] * (1 + 0.1 * draw(m, args[0])), *args[1:]))"),
    Route("inner hook", _SCALE, init="self.lin.register_forward_hook(lambda m, args, out: out * (1 + 0.1 * draw(self, args[0])))"),
    Route("inner pre-hook", _SCALE, init="self.lin.register_forward_pre_hook(lambda m, args: (args[0] * (1 + 0.1 * draw(self, args[0])),))"),
    Route("backward hook", _SCALE, after="block.register_full_backward_hook(lambda m, gi, go: tuple(g if g is None else g * (1 + 0.1 * draw(m, torch.zeros(2, 6))) for g in gi))"),
    Route("global hook", _SCALE, after="handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: out * (1 + 0.1 * draw(m, args[0])) if m is block else None)", restore="handle.remove()"),
    Route("tensor hook", "x.requires_grad and x.register_hook(lambda g: g * (1 + 0.1 * draw(self, g)))\nvalue = 0.0"),
    Route("parameter hook", _SCALE, after="block.lin.weight.register_hook(lambda g: g * (1 + 0.1 * float(torch.as_tensor(draw(block, g)).sum())))"),
    Route("parametrization", _SCALE, "class Param(nn.Module):\n    def __init__(self, block):\n        super().__init__()\n        self.block = [block]\n    def forward(self, w):\n        return w * (1 + 0.1 * float(torch.as_tensor(draw(self.block[0], w)).sum()))\n",
          "nn.utils.parametrize.register_parametrization(self.lin, 'bias', Param(self))"),
    Route("function forward", "x = Scaled.apply(x, self)\nvalue = 0.0", "class Scaled(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, block):\n        return x * (1 + 0.1 * draw(block, x))\n    @staticmethod\n    def backward(ctx, g):\n        return g, None\n"),
    Route("function backward", "x = Scaled.apply(x, self)\nvalue = 0.0", "class Scaled(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, block):\n        ctx.block = block\n        return x * 1\n    @staticmethod\n    def backward(ctx, g):\n        return g * (1 + 0.1 * draw(ctx.block, g)), None\n"),
    Route("activation", "value = self.layer(torch.ones(1, 2, 4).to(x)).mean()",
          init="self.layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, activation=lambda t: torch.relu(t) * (1 + 0.1 * float(torch.as_tensor(draw(self, t)).sum())), batch_first=True)"),
    Route("checkpoint", "value = torch.utils.checkpoint.checkpoint(lambda t: t * (1 + 0.1 * draw(self, t)), x, use_reentrant=False).mean()"),
    Route("vmap", "value = torch.vmap(lambda t: t * (1 + 0.1 * float(torch.as_tensor(draw(self, torch.zeros(2, 6))).sum())), randomness='different')(x).mean()"),
    Route("assigned forward", _SCALE, after="before = model.forward\nmodel.forward = lambda *args: before(*args) * (1 + 0.1 * float(torch.as_tensor(draw(block, args[0])).sum()))"),
    Route("assigned inner forward", _SCALE, after="inside = block.forward\nblock.forward = lambda *args: inside(*args) * (1 + 0.1 * draw(block, args[0]))"),
    Route("assigned method", _SCALE, after="block.lin.forward = types.MethodType(lambda m, x: F.linear(x, m.weight, m.bias) * (1 + 0.1 * draw(block, x)), block.lin)"),
    Route("patched dropout", "value = F.dropout(x, 0.1, self.training).mean()", after="dropout = F.dropout\nF.dropout = lambda x, p=0.5, training=True, inplace=False: x * (1 + 0.1 * draw(block, x))", restore="F.dropout = dropout"),
    Route("patched global", "value = act(x).mean()", "act = torch.relu\n", after="global act\nact = lambda x: x * (1 + 0.1 * draw(block, x))"),
    Route("patched method", "value = self.late(x)", body="def late(self, x):\n    return 0.0", after="Block.late = draw"),
    Route("patched class of torch", _SCALE, after="was = nn.Linear.forward\nnn.Linear.forward = lambda m, x: was(m, x) * (1 + 0.1 * draw(block, x)) if m is block.lin else was(m, x)", restore="nn.Linear.forward = was"),
    Route("patched tensor", "value = x.sum().tanh()", after="was = torch.Tensor.tanh\ntorch.Tensor.tanh = lambda t: was(t) * (1 + 0.1 * float(torch.as_tensor(draw(block, torch.zeros(2, 6))).sum()))", restore="torch.Tensor.tanh = was"),
    Route("torch function mode", "with Mode(self):\n    value = torch.relu(x).mean()", "class Mode(torch.overrides.TorchFunctionMode):\n    def __init__(self, block):\n        super().__init__()\n        self.block = block\n    def __torch_function__(self, function, types, args=(), kwargs=None):\n        out = function(*args, **(kwargs or {}))\n        return out * (1 + 0.1 * float(torch.as_tensor(draw(self.block, torch.zeros(2, 6))).sum())) if function is torch.relu else out\n"),
    Route("tensor subclass", "value = torch.relu(x.as_subclass(Kind)).mean().as_subclass(torch.Tensor)", "kept = []\nclass Kind(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, function, types, args=(), kwargs=None):\n        out = super().__torch_function__(function, types, args, kwargs or {})\n        return out * (1 + 0.1 * float(torch.as_tensor(draw(kept[0], torch.zeros(2, 6))).sum())) if function is torch.relu else out\n", after="kept.append(block)"),
    Route("saved tensor hooks", "with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * (1 + 0.1 * float(torch.as_tensor(draw(self, torch.zeros(2, 6))).sum()))):\n    x = x * x.sigmoid()\nvalue = 0.0"),
    Route("sequential call", "value = self.more(x).mean()", "class Lambda(nn.Module):\n    def __init__(self, function):\n        super().__init__()\n        self.function = function\n    def forward(self, x):\n        return self.function(x)\n", "self.more = nn.Sequential(nn.Identity(), Lambda(lambda x: x * (1 + 0.1 * draw(self, x))))"),
    Route("list subclass", "for part in self.parts_:\n    x = part(x)\nvalue = 0.0", "class Parts(nn.ModuleList):\n    block = []\n    def __iter__(self):\n        for part in super().__iter__():\n            part.p = 0.0 if float(torch.as_tensor(draw(self.block[0], torch.zeros(2, 6))).sum()) > 0.7 else 0.3\n            yield part\n", "self.parts_ = Parts([nn.Dropout(0.0)])\nself.parts_.block = [self]"),
    Route("thread", "found = []\nworker = threading.Thread(target=lambda: found.append(draw(self, x)))\nworker.start()\nworker.join()\nvalue = found[0]"),
    Route("finalizer", "weakref.finalize(Made(), draw, self, x.detach())\nvalue = 0.5", "class Made:\n    pass\n"),
    Route("import inside", "from {program} import draw as again\nvalue = again(self, x)", mode="import"),
    Route("evaluated", "value = eval('draw(self, x)')"),
    Route("by name", "value = globals()['draw'](self, x)"),
    Route("by attribute of the module", "value = getattr(sys.modules[__name__], 'draw')(self, x)"),
    Route("distance", "value = self.far(x, x + 1, x + 9)", init="self.far = nn.TripletMarginWithDistanceLoss(distance_function=lambda a, b: (a - b).abs().mean(-1) * (1 + 0.1 * float(torch.as_tensor(draw(self, a)).sum())))"),
    Route("except", "try:\n    raise ValueError\nexcept Exception:\n    value = draw(self, x)"),
    Route("finally", "try:\n    value = 0.0\nfinally:\n    value = draw(self, x)"),
    Route("assert", "assert draw(self, x) is not None\nvalue = 0.5"),
    *(_special(*row) for row in _SPECIAL if row[2] != "pass"),
]  # fmt: skip
