"""Effects: what a forward reaches besides tensors, as statements and a value over an object `{o}`.

`make` creates the object; `script` is what the training loop does in every step; `seen` is compared in the end.
"""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = {
    0: "pure",
    1: "own numpy generator",
    2: "global generator",
    3: "torch generator",
    4: "generator shared with the data",
    5: "iterators",
    6: "shared counters and locks",
    7: "files, environment and clocks",
    8: "output",
    9: "queues and pipes",
    10: "changed state",
}


@dataclass(frozen=True)
class Effect:
    """One effect. Without `make` there is no object, and `code` holds what it needs."""

    family: int
    make: str
    value: str
    lines: str = ""
    code: str = ""
    script: str = ""
    seen: str = ""

    @property
    def name(self) -> str:
        return f"{self.lines}; {self.value}".strip("; ").replace("\n", "; ")


def _family(family: int, *rows: tuple[str, ...], **common: str) -> list[Effect]:
    return [Effect(family, *row, **common) for row in rows]


_NUMPY_DRAWS = (
    "{o}.normal()", "{o}.random()", "{o}.integers(0, 5)", "{o}.standard_normal(2)[0]", "{o}.permutation(4)[0]",
    "{o}.choice([1.0, 2.0])", "torch.from_numpy({o}.normal(size=6))", "float({o}.uniform(0, 1)) * x.shape[1]",
)  # fmt: skip
_NUMPY = [("np.random.default_rng(3)", draw) for draw in _NUMPY_DRAWS]
_STATE = "str({o}.bit_generator.state)"
_OTHERS = (
    ("np.random.RandomState(3)", "{o}.rand()"),
    ("np.random.RandomState(3)", "{o}.randint(5)"),
    ("np.random.RandomState(3)", "torch.tensor({o}.randn(6))"),
)
_PYTHON = (
    ("random.Random(3)", "{o}.random()"),
    ("random.Random(3)", "{o}.choice([1.0, 2.0, 3.0])"),
    ("random.Random(3)", "{o}.gauss(0, 1)"),
    ("random.Random(3)", "{o}.randrange(5)"),
    ("random.Random(3)", "{o}.sample([1.0, 2.0, 3.0], 1)[0]"),
)
_TORCH = [
    ("torch.Generator().manual_seed(3)", draw)
    for draw in (
        "torch.randn((), generator={o}).double()", "torch.rand(6, generator={o}).double()",
        "torch.bernoulli(torch.full((6,), 0.5).double(), generator={o})", "torch.randperm(4, generator={o})[0].item()",
        "torch.multinomial(torch.ones(4), 1, generator={o}).item()",
        "torch.empty(6).double().normal_(generator={o})", "torch.randint(5, (), generator={o})",
        "torch.normal(0.0, 1.0, (6,), generator={o}).double()", "torch.empty(()).uniform_(generator={o}).item()",
    )
]  # fmt: skip
_TORCH_STATE = "{o}.get_state()"

EFFECTS = [
    *_family(1, *_NUMPY, seen=_STATE),
    *_family(2, *_NUMPY[:5], ("np.random.Generator(np.random.PCG64(3))", "{o}.normal()"), seen=_STATE),
    *_family(2, *_OTHERS, seen="str({o}.get_state())"),
    *_family(2, *_PYTHON, seen="{o}.getstate()"),
    *_family(3, *_TORCH, seen=_TORCH_STATE),
    *_family(4, *_NUMPY[:4], script="x = x + {o}.normal()", seen=_STATE),
    *_family(4, *_OTHERS[:1], script="x = x + {o}.rand()", seen="str({o}.get_state())"),
    *_family(4, *_PYTHON[:2], script="x = x + {o}.random()", seen="{o}.getstate()"),
    *_family(4, *_TORCH[:4], script="x = x + torch.randn(9, generator={o}).double()", seen=_TORCH_STATE),
    *_family(
        5,
        ("itertools.cycle([1.0, 2.0, 3.0])", "next({o})"),
        ("itertools.count()", "next({o}) % 5"),
        ("iter(range(10**6))", "next({o}) % 5"),
        ("iter([0.1 * i for i in range(1000)])", "next({o}, 0.0)"),
        ("(0.1 * i for i in range(10**6))", "next({o})"),
        ("itertools.accumulate(itertools.repeat(0.1))", "{o}.__next__()"),
        ("enumerate(itertools.repeat(0.5))", "next({o})[0] % 5"),
        ("zip(itertools.count(), itertools.repeat(1))", "sum(next({o})) % 5"),
        ("map(float, itertools.count())", "[*itertools.islice({o}, 2)][1] % 5"),
        ("reversed(range(1000))", "next({o}) % 7"),
        ("Countdown()", "next({o}) % 5"),
        code="class Countdown:\n    n = 0\n    def __next__(self):\n        self.n += 1\n        return self.n\n",
        seen="next({o})",
    ),
    Effect(5, "iter([1.0, 2.0, 3.0] * 99)", "value", "for value in {o}:\n    break", seen="next({o})"),
    Effect(5, "deque([1.0, 2.0, 3.0])", "{o}[0]", "{o}.rotate(1)", seen="[*{o}]"),
    Effect(5, "walk()", "{o}.send(1.5)", code="def walk():\n    at = yield 0.0\n    while True:\n        at = 0.5 * (yield at) + at % 3\n",
           script="step == 0 and next({o})", seen="{o}.send(0.0)"),
    *_family(
        6,
        ("multiprocessing.Value('d', 1.0)", "{o}.value % 5", "{o}.value += 1"),
        ("multiprocessing.RawValue('d', 1.0)", "{o}.value % 5", "{o}.value += 1"),
        ("ctypes.c_double(1.0)", "{o}.value % 5", "{o}.value += 0.5"),
        ("ctypes.c_int(1)", "{o}.value % 5", "{o}.value += 1"),
        seen="{o}.value",
    ),
    *_family(
        6,
        ("multiprocessing.Array('d', [1.0, 2.0])", "{o}[0] % 5", "{o}[0] += 1"),
        ("(ctypes.c_double * 2)(1.0, 2.0)", "{o}[0] % 5", "{o}[0] += 1"),
        ("array.array('d', [1.0, 2.0])", "{o}[0] % 5", "{o}[0] += 1"),
        ("bytearray(2)", "{o}[0] % 5", "{o}[0] += 1"),
        ("memoryview(bytearray(2))", "{o}[0] % 5", "{o}[0] += 1"),
        ("mmap.mmap(-1, 8)", "{o}[0] % 5", "{o}[0] = {o}[0] + 1"),
        seen="[*{o}]",
    ),
    *_family(
        6,
        ("threading.Event()", "1.0 if {o}.is_set() else 2.0", "", "", "{o}.set() if step % 2 else {o}.clear()"),
        ("threading.Lock()", "1.0 if {o}.acquire(blocking=False) else 2.0", "", "", "step % 3 == 2 and {o}.locked() and {o}.release()"),
        ("threading.Semaphore(5)", "float({o}.acquire(blocking=False))"),
        ("threading.RLock()", "len([{o}.acquire() for _ in 'a']) * 0.5"),
        seen="type({o}).__name__",
    ),
    *_family(
        7,
        ("'factor.txt'", "float(open({o}).read())"),
        ("'factor.txt'", "float(Path({o}).read_text())"),
        ("Path('factor.txt')", "float({o}.read_text())"),
        ("Path('factor.txt')", "{o}.stat().st_size"),
        ("'factor.txt'", "os.stat({o}).st_size"),
        ("'factor.txt'", "os.path.getsize({o})"),
        ("'factor.txt'", "float(np.loadtxt({o}))"),
        ("'factor.txt'", "json.load(open({o})) * 0.5"),
        ("Path('factor.txt')", "float(linecache.checkcache() or {o}.open().readline())"),
        script="Path('factor.txt').write_text('1' * (1 + step % 3) + '.5')",
    ),
    *_family(
        7,
        ("'flag'", "1.0 if os.path.exists({o}) else 2.0"),
        ("Path('flag')", "1.0 if {o}.exists() else 2.0"),
        ("'.'", "len(os.listdir({o})) % 5"),
        ("'*'", "len(glob.glob({o})) % 5"),
        script="Path('flag').unlink(missing_ok=True) if step % 2 else Path('flag').write_text('')",
    ),
    *_family(
        7,
        ("'FACTOR'", "float(os.environ.get({o}, '1'))"),
        ("'FACTOR'", "float(os.getenv({o}, '1'))"),
        ("'FACTOR'", "2.0 if {o} in os.environ else 1.0"),
        ("os.environ", "float({o}.get('FACTOR', '1'))"),
        script="os.environ.update(FACTOR=str(step % 3)) if step % 4 else os.environ.pop('FACTOR', None)",
    ),
    *_family(
        7,
        ("os.getpid()", "float({o} == os.getpid())"),
        ("'MainThread'", "float(threading.current_thread().name == {o})"),
        ("'MainProcess'", "float(multiprocessing.current_process().name == {o})"),
        ("len(sys.argv)", "float(len(sys.argv) == {o})"),
        ("os.getcwd()", "float(os.getcwd() == {o})", "", "", "os.makedirs('inner', exist_ok=True); step % 3 == 2 and os.chdir('inner' if step % 2 else '..')"),
        ("types.SimpleNamespace(now=0)", "time.time() % 5", "", "", "time.time = lambda: float(step)"),
        ("types.SimpleNamespace(now=0)", "time.perf_counter() % 5", "", "", "time.perf_counter = lambda: float(step)"),
        ("uuid.UUID(int=5)", "uuid.uuid4().int % 5", "", "", "uuid.uuid4 = lambda: uuid.UUID(int=step)"),
        ("0", "torch.initial_seed() % 7 + {o}", "", "", "torch.manual_seed(step)"),
        ("0", "float(torch.get_rng_state().double().sum() % 7) + {o}"),
        ("0", "float(np.random.get_state()[2] % 7) + {o}", "", "", "np.random.rand(step)"),
        ("0", "float(sum(random.getstate()[1]) % 7) + {o}", "", "", "random.random()"),
        ("torch", "float({o}.get_default_dtype() is torch.float32)", "", "", "torch.set_default_dtype(torch.float64 if step % 2 else torch.float32)"),
        ("0", "sys.getrecursionlimit() % 7 + {o}", "", "", "sys.setrecursionlimit(3000 + step)"),
        ("gc", "float({o}.isenabled())", "", "", "gc.disable() if step % 2 else gc.enable()"),
        ("0", "float('seven' in sys.modules) + {o}", "", "", "step == 4 and sys.modules.update(seven=sys)"),
    ),
    *_family(
        8,
        ("open('out.csv', 'a')", "0.5", "csv.writer({o}).writerow([len(x), self.training])"),
        ("csv.writer(open('out.csv', 'a', buffering=1))", "0.5", "{o}.writerow([len(x)])"),
        ("'out.csv'", "0.5", "with open({o}, 'a') as file:\n    file.write(f'{len(x)} {torch.is_grad_enabled()}')"),
        ("Path('out.csv')", "0.5", "{o}.write_text(str(self.calls) if {o}.exists() else 'first')"),
        ("'out.csv'", "0.5", "np.savetxt({o}, [len(x), self.calls])"),
        ("'out.csv'", "0.5", "json.dump([len(x), self.calls], open({o}, 'w'))"),
        ("'out.csv'", "0.5", "print(len(x), self.calls, file=open({o}, 'a'))"),
        ("'out.csv'", "0.5", "os.close(os.open({o} + str(len(os.listdir('.')) % 5), os.O_CREAT))"),
        ("'out'", "0.5", "os.makedirs({o} + str(self.calls % 3), exist_ok=True)"),
        ("'out.pt'", "0.5", "torch.save(len(x) + self.calls, {o})"),
        seen="[(str(one), one.is_file() and one.stat().st_size) for one in sorted(Path('.').iterdir())]",
        script="gc.collect()",
    ),
    *_family(
        8,
        ("io.StringIO()", "0.5", "{o}.write(f'{len(x)},')"),
        ("io.StringIO()", "0.5", "print(len(x), file={o})"),
        ("io.BytesIO()", "0.5", "{o}.write(b'abc')"),
        seen="{o}.getvalue()",
    ),
    *_family(
        8,
        ("print", "0.5", "{o}(tuple(x.shape), self.training)"),
        ("'x'", "0.5", "print({o}, len(x))"),
        ("sys", "0.5", "{o}.stdout.write('x')"),
        ("logging.getLogger('made')", "0.5", "{o}.info('%s', len(x))"),
        ("'made'", "0.5", "logging.getLogger({o}).warning('%s', len(x))"),
        ("warnings", "0.5", "{o}.warn(f'{self.calls} calls')"),
        ("pprint", "0.5", "{o}.pprint([len(x)])"),
        ("sys", "0.5", "{o}.displayhook(len(x))"),
        code=(
            "class Out(logging.Handler):\n    def emit(self, record):\n        print(record.getMessage())\n"
            "logging.getLogger('made').addHandler(Out())\nlogging.getLogger('made').setLevel('INFO')\n"
            "logging.getLogger('made').propagate = False\n"
        ),
    ),
    Effect(8, "sqlite3.connect(':memory:', check_same_thread=False)", "0.5",
           "{o}.execute('create table if not exists t (n)')\n{o}.execute('insert into t values (?)', (len(x),))",
           seen="{o}.execute('select n from t').fetchall()"),
    *_family(
        9,
        ("queued(queue.Queue())", "{o}.get_nowait() % 5"),
        ("queued(queue.SimpleQueue())", "{o}.get_nowait() % 5"),
        ("queued(queue.LifoQueue())", "{o}.get_nowait() % 5"),
        ("queued(queue.PriorityQueue())", "{o}.get() % 5"),
        code="def queued(made):\n    for i in range(400):\n        made.put(0.5 * i)\n    return made\n",
        seen="{o}.qsize()",
    ),
    *_family(
        9,
        ("deque(range(400))", "{o}.popleft() % 5"),
        ("deque(range(400))", "{o}.pop() % 5"),
        ("[*range(400)]", "{o}.pop() % 5"),
        ("[*range(400)]", "heapq.heappop({o}) % 5"),
        ("[*range(400)]", "list.pop({o}) % 5"),
        ("dict.fromkeys(range(400))", "{o}.popitem()[0] % 5"),
        ("{*range(400)}", "{o}.pop() % 5"),
        ("OrderedDict.fromkeys(range(400))", "{o}.popitem(last=False)[0] % 5"),
        seen="[*{o}]",
    ),
    Effect(9, "[*range(400)]", "{o}[0] % 5", "del {o}[0]", seen="[*{o}]"),
    Effect(9, "io.BytesIO(bytes(range(200)))", "{o}.read(1)[0] % 5", seen="{o}.tell()"),
    Effect(9, "io.StringIO('1\\n2\\n3\\n' * 99)", "float({o}.readline())", seen="{o}.tell()"),
    Effect(9, "filled(os.pipe())", "float(os.read({o}[0], 1)[0] % 5)",
           code="def filled(pipe):\n    os.write(pipe[1], bytes(range(200)))\n    return pipe\n"),
    Effect(9, "talking(socket.socketpair())", "float({o}[0].recv(1)[0] % 5)",
           code="def talking(pair):\n    pair[1].send(bytes(range(200)))\n    return pair\n", seen="{o}[0].recv(1)"),
    Effect(9, "piped(multiprocessing.Pipe())", "{o}[0].recv() % 5",
           code="def piped(pair):\n    for i in range(300):\n        pair[1].send(i)\n    return pair\n", seen="{o}[0].recv()"),
]  # fmt: skip
