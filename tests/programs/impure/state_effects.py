"""Effects that change state: objects, containers, arrays, and variables of the program."""

from __future__ import annotations

from tests.programs.impure.effects import Effect

_CODE = """
class Counter_:
    n = 0
    def __init__(self):
        self.n = 0
        self.items = [0]
    def bump(self):
        self.n += 1
    def __iadd__(self, other):
        self.n += other
        return self
    @property
    def next(self):
        self.n += 1
        return self.n
    @next.setter
    def next(self, value):
        self.n = value
class Slotted:
    __slots__ = ("n", "__weakref__")
    def __init__(self):
        self.n = 0
@dataclass
class Settings:
    n: int = 0
@dataclass(frozen=True)
class Frozen:
    n: int = 0
class Ordered(OrderedDict):
    pass
class Default(dict):
    def __missing__(self, key):
        self[key] = 0
        return 0
class Level(float):
    pass
class Local(threading.local):
    n = 0
class Item(Enum):
    A = 1
"""
_ATTRIBUTE = (
    "Counter_()", "Slotted()", "Settings()", "types.SimpleNamespace(n=0)", "argparse.Namespace(n=0)", "Local()",
)  # fmt: skip
_WRITES = (
    "{o}.n += 1", "setattr({o}, 'n', {o}.n + 1)", "object.__setattr__({o}, 'n', {o}.n + 1)",
    "{o}.__setattr__('n', {o}.n + 1)", "self.calls, {o}.n = self.calls, {o}.n + 1", "{o}.n = value = {o}.n + 1",
)  # fmt: skip
_MAPPINGS = (
    ("{'n': 0}", "{o}['n'] += 1"), ("{'n': 0}", "{o}.update(n={o}['n'] + 1)"), ("{'n': 0}", "dict.update({o}, n={o}['n'] + 1)"),
    ("{'n': 0}", "operator.setitem({o}, 'n', {o}['n'] + 1)"), ("Ordered(n=0)", "{o}['n'] += 1"),
    ("collections.Counter(n=0)", "{o}.update('n')"), ("collections.Counter(n=0)", "{o}['n'] += 1"),
    ("collections.UserDict(n=0)", "{o}['n'] += 1"), ("collections.ChainMap({'n': 0})", "{o}['n'] += 1"),
    ("Default()", "{o}['n'] += 1"), ("defaultdict(int)", "{o}['n'] += 1"), ("{'n': 0}", "{o}.__setitem__('n', {o}['n'] + 1)"),
    ("{'n': 0}", "{o}.setdefault('n', 0); {o}['n'] = {o}.pop('n') + 1"),
)  # fmt: skip
_LISTS = (
    "{o}[0] += 1", "{o}.insert(0, {o}[0] + 1)", "{o}[:] = [{o}[0] + 1]", "{o}.append({o}.pop(0) + 1)",
    "list.__setitem__({o}, 0, {o}[0] + 1)", "{o}.extend([{o}.pop() + 1])", "{o}.reverse(); {o}[-1] += 1",
    "operator.iadd({o}, [{o}.pop() + 1])", "{o} .__iadd__([{o}.pop() + 1])", "bisect.insort({o}, {o}.pop() + 1)",
    "list.append({o}, {o}.pop() + 1)", "heapq.heappush({o}, {o}.pop() + 1)",
)  # fmt: skip
_ARRAYS = (
    ("np.zeros(2)", "{o}[0] += 1"), ("np.zeros(2)", "np.add({o}, 1, out={o})"), ("np.zeros(2)", "{o}.fill({o}[0] + 1)"),
    ("np.arange(4.0)", "np.random.shuffle({o})"), ("np.arange(4.0)", "{o}.sort(); {o}[0] += 7"),
    ("np.zeros(2)", "np.copyto({o}, {o} + 1)"), ("np.zeros(2)", "{o}.itemset(0, {o}[0] + 1) if hasattr({o}, 'itemset') else {o}.put(0, {o}[0] + 1)"),
    ("np.zeros(2)", "{o}.flat[0] += 1"), ("np.zeros(2)", "view = {o}[:1]; view += 1"), ("collections.UserList([0])", "{o}[0] += 1"),
    ("torch.zeros(2).double()", "{o} .add_(1)"), ("torch.zeros(2).double()", "{o}[0] += 1"),
    ("torch.zeros(2).double()", "torch.add({o}, 1, out={o})"), ("torch.zeros(2).double()", "{o}.data += 1"),
    ("torch.zeros(2).double()", "{o}.numpy()[0] += 1"), ("torch.zeros(2).double()", "{o}.copy_({o} + 1)"),
)  # fmt: skip


def _attributes() -> list[Effect]:
    made = [Effect(10, make, "{o}.n % 5", write, _CODE, seen="{o}.n") for make in _ATTRIBUTE for write in _WRITES[:2]]
    made += [Effect(10, "Counter_()", "{o}.n % 5", write, _CODE, seen="{o}.n") for write in _WRITES]
    made += [
        Effect(10, make, "{o}.n % 5", write, _CODE, seen="{o}.n")
        for make, write in (
            ("Counter_()", "{o}.bump()"), ("Counter_()", "Counter_.bump({o})"), ("Counter_()", "{o}.next"),
            ("Counter_()", "{o}.next = {o}.n + 1"), ("Counter_()", "type({o}).n += 1; {o}.n = type({o}).n"),
            ("Counter_()", "{o}.__dict__['n'] += 1"), ("Counter_()", "vars({o})['n'] += 1"),
            ("Counter_()", "{o}.__class__.n += 1; {o}.n = Counter_.n"), ("Counter_()", "{o}.__init__() if {o}.n > 2 else {o}.bump()"),
            ("Frozen()", "object.__setattr__({o}, 'n', {o}.n + 1)"), ("Counter_()", "{o}.items.append(1); {o}.n = len({o}.items)"),
            ("Item.A", "{o}.n = getattr({o}, 'n', 0) + 1"), ("Counter_", "{o}.n += 1"), ("Item", "{o}.n = getattr({o}, 'n', 0) + 1"),
            ("Counter_()", "operator.methodcaller('bump')({o})"), ("Counter_()", "getattr({o}, 'bu' + 'mp')()"),
        )
    ]  # fmt: skip
    return made


def _contents() -> list[Effect]:
    made = [Effect(10, make, "{o}['n'] % 5", write, _CODE, seen="[*{o}.items()]") for make, write in _MAPPINGS]
    made += [Effect(10, "[0]", "{o}[0] % 5", write, seen="[*{o}]") for write in _LISTS]
    made += [Effect(10, make, "{o}[0] % 5", write, seen="[*map(float, {o})]") for make, write in _ARRAYS]
    made.append(Effect(10, "{0}", "len({o}) % 5", "{o}.add(len({o}))", seen="len({o})"))
    made.append(Effect(10, "Level(1.0)", "{o}.n % 5", "{o}.n = getattr({o}, 'n', 0) + 1", _CODE, seen="{o}.n"))
    made.append(Effect(10, "ContextVar('n', default=0)", "{o}.get() % 5", "{o}.set({o}.get() + 1)", seen="{o}.get()"))
    return made


def _without_objects() -> list[Effect]:
    held = "class Held:\n    n = 0\nheld = Held()\n"
    rows = (
        ("n % 5", "global n\nn += 1", "n = 0\n", "n"),
        ("globals()['n'] % 5", "globals()['n'] += 1", "n = 0\n", "n"),
        ("vars(sys.modules[__name__])['n'] % 5", "vars(sys.modules[__name__])['n'] += 1", "n = 0\n", "n"),
        ("count()", "", "def around():\n    n = 0\n    def count():\n        nonlocal n\n        n += 1\n        return n % 5\n    return count\ncount = around()\n", "count()"),
        ("count() % 5", "", "def count(seen=[]):\n    seen.append(1)\n    return len(seen)\n", "count()"),
        ("count() % 5", "", "def count(*, seen={'n': 0}):\n    seen['n'] += 1\n    return seen['n']\n", "count()"),
        ("count() % 5", "", "def count():\n    count.n += 1\n    return count.n\ncount.n = 0\n", "count.n"),
        ("weak().n % 5", "weak().n += 1", held + "weak = weakref.ref(held)\n", "held.n"),
        ("proxy.n % 5", "proxy.n += 1", held + "proxy = weakref.proxy(held)\n", "held.n"),
        ("state()[0] % 5", "state()[0] += 1", "@functools.lru_cache\ndef state():\n    return [0]\n", "state()"),
        ("state().n % 5", "s = state()\ns.n += 1", held + "@functools.cache\ndef state():\n    return Held()\n", "state().n"),
        ("cached(len(x)).n % 5", "cached(len(x)).n += 1", held + "@functools.lru_cache\ndef cached(n):\n    return held\n", "held.n"),
        ("count.cache_info().hits % 5", "count(1)", "@functools.lru_cache\ndef count(n):\n    return n\n", "tuple(count.cache_info())"),
        ("(lambda: count.__defaults__[0][0] % 5)()", "count.__defaults__[0][0] += 1", "def count(n=[0]):\n    return n\n", "count()"),
        ("part.keywords['n'][0] % 5", "part.keywords['n'][0] += 1", "part = functools.partial(dict, n=[0])\n", "part()"),
        ("builtins.made_n % 5", "builtins.made_n = getattr(builtins, 'made_n', 0) + 1", "builtins.made_n = 0\n", "builtins.made_n"),
        ("math.made_n % 5", "math.made_n += 1", "math.made_n = 0\n", "math.made_n"),
        ("nn.Linear.made_n % 5", "nn.Linear.made_n = nn.Linear.made_n + 1", "nn.Linear.made_n = 0\n", "nn.Linear.made_n"),
        ("type(self).made_n % 5", "type(self).made_n = getattr(type(self), 'made_n', 0) + 1", "", "getattr(type(block), 'made_n', 0)"),
        ("self.__class__.many[0] % 5", "self.__class__.many = [getattr(self.__class__, 'many', [0])[0] + 1]", "", "getattr(type(block), 'many', 0)"),
        ("len(os.environ.get('COUNTED', '')) % 5", "os.environ['COUNTED'] = os.environ.get('COUNTED', '') + 'a'", "os.environ['COUNTED'] = ''\n", "os.environ['COUNTED']"),
        ("held.n % 5", "eval('held').__dict__.update(n=held.n + 1)", held, "held.n"),
        ("held.n % 5", "exec('held.n += 1')", held, "held.n"),
    )  # fmt: skip
    return [Effect(10, "", value, lines, code, seen=seen) for value, lines, code, seen in rows]


STATE_EFFECTS = [*_attributes(), *_contents(), *_without_objects()]
