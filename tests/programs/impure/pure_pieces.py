"""Pieces of pure programs: values that depend on tensors, configurations, global generators and own state alone."""

from __future__ import annotations

from collections.abc import Iterator

from tests.programs.impure.compose import Program, compose_pieces
from tests.programs.impure.effects import Effect
from tests.programs.impure.routes import ROUTES

_CONFIG = "@dataclass\nclass Config:\n    scale: float = 0.5\n    names: list = field(default_factory=list)\n    def factor(self):\n        return math.sqrt(self.scale)\n"
_SQUARE = (
    "class Square(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        ctx.save_for_backward(x)\n        return x * x\n"
    "    @staticmethod\n    def backward(ctx, g):\n        (x,) = ctx.saved_tensors\n        return 2 * x * g\n"
)
_KIND = (
    "class Kind(Enum):\n    A = 'a'\n    B = 'b'\n    def scale(self):\n        return 0.5 if self is Kind.A else 1.5\n"
)
_OUTPUT = (
    "@dataclass\nclass Output(OrderedDict):\n    value: Any = None\n    other: Any = None\n    def __post_init__(self):\n"
    "        for one in dataclasses.fields(self):\n            if getattr(self, one.name) is not None:\n"
    "                super().__setitem__(one.name, getattr(self, one.name))\n    def __getitem__(self, key):\n"
    "        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]\n"
)
_ROWS: tuple[tuple[str, ...], ...] = (
    ("dropout", "F.dropout(x, 0.1, self.training)"),
    ("numpy's generator", "np.random.rand()"),
    ("python's generator", "random.random()"),
    ("python's choice", "random.choice([0.5, 1.0])"),
    ("torch's generator", "torch.rand(6).double()"),
    ("noise", "torch.randn_like(x) * 0.1"),
    ("dataclass", "config.factor()", "", _CONFIG + "config = Config()\n"),
    ("own dataclass", "Config(0.3).factor()", "", _CONFIG),
    ("arguments", "args.tau * 2", "", "args = argparse.Namespace(tau=0.5, lr=0.1)\n"),
    ("namespace", "options.inner.tau", "", "options = types.SimpleNamespace(inner=types.SimpleNamespace(tau=0.5))\n"),
    ("enumeration", "1.0 if kind is Kind.A else 2.0", "", _KIND + "kind = Kind.A\n"),
    ("enumeration with a method", "kind.scale()", "", _KIND + "kind = Kind.A\n"),
    ("enumeration by value", "Kind('b').scale()", "", _KIND),
    ("table of activations", "table['gelu'](x)", "", "table = {'relu': F.relu, 'gelu': F.gelu, 'tanh': torch.tanh}\n"),
    ("activation by name", "getattr(F, name)(x)", "", "name = 'gelu'\n"),
    ("activation classes", "table['gelu']()(x)", "", "table = {'relu': nn.ReLU, 'gelu': nn.GELU}\n"),
    ("memoized positions", "positions(x.shape[1]).double() * 0.1", "", "@functools.lru_cache(maxsize=None)\ndef positions(n):\n    return torch.arange(n)\n"),
    ("rearranged", "split(x, 2).transpose(1, 2).reshape(len(x), 6)", "", "def split(x, parts):\n    return x.reshape(x.shape[0], parts, -1)\n"),
    ("autograd function", "Square.apply(x)", "", _SQUARE),
    ("closure over a number", "scaled(x)", "", "def make(factor):\n    def scaled(x):\n        return x * factor\n    return scaled\nscaled = make(0.3)\n"),
    ("closure over a tensor", "scaled(x)", "", "def make(factor):\n    return lambda x: x * factor\nscaled = make(torch.ones(6).double())\n"),
    ("global tensor", "x * shift", "", "shift = torch.linspace(0, 1, 6).double()\n"),
    ("global array", "x * float(array.sum())", "", "array = np.linspace(0, 1, 6)\n"),
    ("array as a tensor", "x * torch.from_numpy(weights)", "", "weights = np.linspace(0, 1, 6)\n"),
    ("class constants", "Base.scale * Base.table[1]", "", "class Base:\n    scale, table = 0.5, (1, 2)\n"),
    ("class hierarchy", "Heir(0.5)(x)", "", "class Base:\n    def __init__(self, scale):\n        self.scale = scale\n    def __call__(self, x):\n        return self.act(x) * self.scale\n    def act(self, x):\n        raise NotImplementedError\nclass Heir(Base):\n    def act(self, x):\n        return torch.tanh(x)\n"),
    ("abstract class", "Heir()(x)", "", "from abc import ABC, abstractmethod\nclass Base(ABC):\n    @abstractmethod\n    def __call__(self, x): ...\nclass Heir(Base):\n    def __call__(self, x):\n        return x.sigmoid()\n"),
    ("named tuple", "Pair(x, 0.5).first * pair.second", "", "class Pair(NamedTuple):\n    first: Any\n    second: float = 0.5\npair = Pair(1)\n"),
    ("collections' named tuple", "pair.b", "", "pair = collections.namedtuple('pair', 'a b')(1, 0.5)\n"),
    ("model output", "Output(value=x * 0.5)['value']", "", _OUTPUT),
    ("model output by position", "Output(value=x * 0.5, other=x)[1]", "", _OUTPUT),
    ("typed", "cast(Any, first([x]))", "", "from typing import cast, TypeVar, Optional, Union, Generic, Callable\nT = TypeVar('T')\ndef first(of: list[T]) -> Optional[T]:\n    return of[0] if of else None\n"),
    ("generic class", "Holder[int](0.5).value", "", "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass Holder(Generic[T]):\n    def __init__(self, value):\n        self.value = value\n"),
    ("protocol", "use(torch.tanh, x)", "", "from typing import Protocol\nclass Acts(Protocol):\n    def __call__(self, x): ...\ndef use(act: Acts, x):\n    return act(x)\n"),
    ("isinstance chain", "pick(x)", "", "def pick(x):\n    if isinstance(x, (list, tuple)):\n        return pick(x[0])\n    elif isinstance(x, dict):\n        return pick(next(iter(x.values())))\n    elif isinstance(x, np.ndarray):\n        return torch.from_numpy(x)\n    return x * 0.5\n"),
    ("unused logger", "x * 0.5", "", "log = logging.getLogger('unused')\ndef report():\n    log.info('done')\n"),
    ("error never raised", "checked(x)", "", "def checked(x):\n    if x.dim() != 2:\n        raise ValueError(f'expected {2} dimensions, got {x.dim()} of {tuple(x.shape)!r}')\n    return x * 0.5\n"),
    ("assertion", "checked(x)", "", "def checked(x):\n    assert x.shape[-1] == 6, f'a width of 6, not {x.shape[-1]}'\n    return x * 0.5\n"),
    ("warning never given", "checked(x)", "", "def checked(x):\n    if x.dim() != 2:\n        warnings.warn(f'{x.dim()} dimensions', stacklevel=2)\n    return x * 0.5\n"),
    ("print never reached", "checked(x)", "", "debug = False\ndef checked(x):\n    if debug:\n        print(x.shape)\n    return x * 0.5\n"),
    ("log never written", "checked(x)", "", "log = logging.getLogger('unused')\ndef checked(x):\n    if x.dim() != 2:\n        log.warning('%s dimensions', x.dim())\n    return x * 0.5\n"),
    ("math", "math.sqrt(x.shape[-1]) * math.pi / math.log(10)"),
    ("partial", "half(x)", "", "half = functools.partial(torch.mul, 0.5)\n"),
    ("partial with keywords", "soft(x)", "", "soft = functools.partial(F.softmax, dim=-1)\n"),
    ("composed functions", "compose(torch.tanh, torch.relu)(x)", "", "def compose(*functions):\n    return functools.reduce(lambda f, g: lambda x: g(f(x)), functions)\n"),
    ("reduction", "functools.reduce(operator.add, [x, x, x]) * 0.1"),
    ("product", "math.prod(x.shape[1:]) * 0.1"),
    ("configuration dictionary", "config['scale'] * config.get('bias', 1.0)", "", "config = {'scale': 0.5, 'layers': [1, 2, {'a': (3,)}]}\n"),
    ("configuration with items", "config['scale']", "", "class Config(dict):\n    __getattr__ = dict.__getitem__\nconfig = Config(scale=0.5)\n"),
    ("configuration by attributes", "config.scale", "", "class Config(dict):\n    def __getattr__(self, name):\n        return self[name]\nconfig = Config(scale=0.5)\n"),
    ("ordered dictionary", "sum(sizes.values()) * 0.1", "", "sizes = OrderedDict(a=1, b=2)\n"),
    ("property", "shape.area * 0.1", "", "class Shape:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n    @property\n    def area(self):\n        return self.a * self.b\nshape = Shape(2, 3)\n"),
    ("cached property", "shape.area * 0.1", "", "class Shape:\n    side = 2\n    @functools.cached_property\n    def area(self):\n        return self.side ** 2\nshape = Shape()\nshape.area\n"),
    ("slots", "point.x", "", "class Point:\n    __slots__ = ('x',)\n    def __init__(self, x):\n        self.x = x\npoint = Point(0.5)\n"),
    ("operators", "(Vector([1, 2]) + Vector([3, 4])).sum() * 0.1", "", "class Vector:\n    def __init__(self, items):\n        self.items = items\n    def __add__(self, other):\n        return Vector([a + b for a, b in zip(self.items, other.items)])\n    def sum(self):\n        return sum(self.items)\n"),
    ("equality and hash", "table[Key(1)]", "", "class Key:\n    def __init__(self, n):\n        self.n = n\n    def __eq__(self, other):\n        return self.n == other.n\n    def __hash__(self):\n        return self.n\ntable = {Key(1): 0.5}\n"),
    ("represented objects", "len(str(Config())) * 0.01", "", _CONFIG),
    ("frozen dataclass", "dataclasses.replace(config, scale=0.25).scale", "", "@dataclass(frozen=True)\nclass Config:\n    scale: float = 0.5\nconfig = Config()\n"),
    ("context manager", "x * 0.5", "with quiet():\n    y = x * 2", "@contextlib.contextmanager\ndef quiet():\n    with torch.no_grad():\n        yield\n"),
    ("null context", "x * 0.5", "with contextlib.nullcontext():\n    y = x * 2"),
    ("without gradients", "scale", "with torch.no_grad():\n    scale = x.abs().mean(1, keepdim=True)"),
    ("decorated without gradients", "scale(x)", "", "@torch.no_grad()\ndef scale(x):\n    return x.abs().mean(1, keepdim=True)\n"),
    ("autocast off", "y", "with torch.autocast('cpu', enabled=False):\n    y = x * 0.5"),
    ("generator function", "sum(parts(x)) * 0.1", "", "def parts(x):\n    for n in range(3):\n        yield x[:, n : n + 1]\n"),
    ("loops", "sum(n * x[:, n : n + 1] for n, _ in enumerate(zip('abc', range(3)))) * 0.1"),
    ("product of ranges", "sum(a * b for a, b in itertools.product(range(2), range(3))) * 0.1"),
    ("chained", "sum(itertools.chain([1], [2, 3])) * 0.1"),
    ("checkpoint", "torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)"),
    ("einsum", "torch.einsum('bi,ij->bj', x, torch.eye(6).to(x))"),
    ("limits of a type", "torch.finfo(x.dtype).eps + x.new_zeros(6)"),
    ("mask", "x.masked_fill(torch.arange(6) > 3, 0.0)"),
    ("in place", "y", "y = x.clone()\ny[:, 0] = 0.5\ny.add_(1)"),
    ("scripting", "x if not torch.jit.is_scripting() else -x"),
    ("version", "x * 0.5 if sys.version_info >= (3, 8) else x"),
    ("signature", "len(inspect.signature(half).parameters) * 0.5", "", "import inspect\ndef half(x):\n    return x / 2\n"),
    ("regular expression", "float(re.match(r'w(\\d+)', name).group(1)) * 0.1", "", "name = 'w6'\n"),
    ("copied configuration", "copy.copy(config).scale", "", _CONFIG + "config = Config()\n"),
    ("decorator", "half(x)", "", "def twice(function):\n    @functools.wraps(function)\n    def inner(*args, **kwargs):\n        return function(*args, **kwargs) + function(*args, **kwargs)\n    return inner\n@twice\ndef half(x):\n    return x * 0.25\n"),
    ("decorator with arguments", "half(x)", "", "def scaled(by):\n    def decorate(function):\n        @functools.wraps(function)\n        def inner(x):\n            return function(x) * by\n        return inner\n    return decorate\n@scaled(0.5)\ndef half(x):\n    return x\n"),
    ("registry", "REGISTRY['tanh'](x)", "", "REGISTRY = {}\ndef register(name):\n    def add(function):\n        REGISTRY[name] = function\n        return function\n    return add\n@register('tanh')\ndef act(x):\n    return torch.tanh(x)\n"),
    ("own counter", "1.0 / (1 + self.steps % 2)", "self.steps = getattr(self, 'steps', 0) + 1"),
    ("own list", "x * 0.5", "self.seen = [len(x.shape)]"),
    ("nested configuration", "size.scale", "", "size = types.SimpleNamespace(scale=0.5, more=OrderedDict(a=1))\n"),
    ("sum of constants", "sum(SIZES) * len(NAMES) * 0.01", "", "from typing import Final\nSIZES: Final = (1, 2, 3)\nNAMES = frozenset({'a', 'b'})\n"),
    ("try", "picked(x)", "", "def picked(x):\n    try:\n        return x * config['missing']\n    except KeyError:\n        return x * 0.5\nconfig = {}\n"),
    ("descriptor", "holder.scale", "", "class Positive:\n    def __set_name__(self, owner, name):\n        self.name = '_' + name\n    def __get__(self, one, kind=None):\n        return getattr(one, self.name)\n    def __set__(self, one, value):\n        setattr(one, self.name, value)\nclass Holder:\n    scale = Positive()\n    def __init__(self):\n        self.scale = 0.5\nholder = Holder()\n"),
    ("collected outputs", "collected(x)[-1]", "", "def collected(x):\n    outputs = []\n    for n in range(2):\n        outputs.append(x * n)\n    found = {}\n    found['x'] = outputs\n    return found['x']\n"),
    ("helper that fills", "filled(x)", "", "TABLE = {'a': 1.0}\ndef fill(target, value):\n    target.append(value)\n    return target\ndef filled(x):\n    return fill([], x * TABLE['a'])[0]\n"),
    ("output with attributes", "made(x).value", "", "class Out:\n    value = None\ndef made(x):\n    out = Out()\n    out.value = x * 0.5\n    return out\n"),
    ("single dispatch", "half(x)", "", "@functools.singledispatch\ndef half(x):\n    return x * 0.5\n@half.register\ndef _(x: list):\n    return half(x[0])\n"),
    ("weak reference", "holder().scale", "", "class Holder:\n    scale = 0.5\nheld = Holder()\nholder = weakref.ref(held)\n"),
)  # fmt: skip
_ROUTES = (
    "inline", "lambda", "table", "partial", "wrapped", "static method", "class method", "method", "inherited", "super",
    "overridden", "mixin", "attribute", "callable object", "bound method", "constructor", "context class", "context manager",
    "generator function", "map", "helper", "sequential call", "own callable", "decorated forward", "own enumeration",
)  # fmt: skip
PURE = tuple(Effect(0, "", row[1], row[2] if len(row) > 2 else "", row[3] if len(row) > 3 else "") for row in _ROWS)
NAMES = tuple(row[0] for row in _ROWS)


def generate_pure() -> Iterator[Program]:
    """Yield one program per piece, each by another route."""
    routes = [route for route in ROUTES if route.name in _ROUTES]
    for number, (name, effect) in enumerate(zip(NAMES, PURE)):
        route = routes[number % len(routes)]
        yield compose_pieces(f"program_0_0_{number}", f"{name} | {route.name}", effect, route)
