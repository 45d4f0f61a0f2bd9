"""Processes and threads that a program starts."""

# ruff: noqa: E501 - a program a line reads better than a program over many

from launching import Case, script

MULTI = """

# ruff: noqa: E501 - a program a line reads better than a program over many
import multiprocessing as mp, os, sys

class Thing:
    def __init__(self, n): self.n = n

def work(thing, queue):
    queue.put((thing.n * 2, __name__, type(thing).__module__, sys.argv, os.path.basename(__file__)))

def fail():
    raise ValueError("in the child")

print("module level", __name__)
if __name__ == "__main__":
    context = mp.get_context(METHOD)
    queue = context.Queue()
    process = context.Process(target=work, args=(Thing(21), queue))
    process.start()
    print(queue.get())
    process.join()
    print(process.exitcode)
    process = context.Process(target=fail, name="failing")
    process.start(); process.join()
    print(process.exitcode)
    with context.Pool(1) as pool:
        print(pool.map(str, [1, 2]))
        pool.close()
        pool.join()
"""

LOADER = """
import torch, os
from torch.utils.data import DataLoader, Dataset
from data import Squares

if __name__ == "__main__":
    for method in (None, "spawn"):
        loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=method)
        print([batch.tolist() for batch in loader])
"""

CASES = [
    *(
        script(f"multiprocessing-{method}", MULTI.replace("METHOD", repr(method)), "x", "--y", unordered=True)
        for method in ("fork", "spawn", "forkserver")
    ),
    *(
        Case(
            f"{method}-in-development-mode",
            ["-X", "dev", "main.py"],
            {"main.py": MULTI.replace("METHOD", repr(method))},
            unordered=True,
        )
        for method in ("spawn", "forkserver")
    ),
    Case(
        "spawn-from-module",
        ["-m", "pkg.main"],
        {"pkg/__init__.py": "", "pkg/main.py": MULTI.replace("METHOD", "'spawn'")},
        unordered=True,
    ),
    script(
        "spawn-without-guard",
        "import multiprocessing as mp\nmp.set_start_method('spawn', force=True)\np = mp.Process(target=print); p.start(); p.join(); print(p.exitcode)",
    ),
    script(
        "spawn-command",
        "import multiprocessing.spawn as s, multiprocessing.util as u\nprint(s.get_command_line(a=1)[1:], u.spawnv_passfds.__name__)",
    ),
    script(
        "process-pool",
        "from concurrent.futures import ProcessPoolExecutor\nimport multiprocessing as mp\nif __name__ == '__main__':\n    with ProcessPoolExecutor(1, mp_context=mp.get_context('spawn')) as e:\n        print(list(e.map(abs, [-1, -2])))\n        e.submit(int, 'x').exception()\n        print(repr(e.submit(int, 'x').exception()))",
    ),
    script(
        "threads",
        "import threading\nr = []\nts = [threading.Thread(target=r.append, args=(i,)) for i in range(3)]\n[t.start() for t in ts]; [t.join() for t in ts]\nprint(sorted(r))",
    ),
    script(
        "non-daemon-thread-outlives-main",
        "import threading\ne = threading.Event()\ndef f():\n    e.wait(); print('thread ends')\nthreading.Thread(target=f).start()\nprint('main ends')\ne.set()",
        unordered=True,
    ),
    script(
        "fork",
        "import os, sys\npid = os.fork()\nif pid == 0:\n    print('child', __name__); sys.exit(4)\nprint(os.waitpid(pid, 0)[1])",
        unordered=True,
    ),
    script(
        "subinterpreters-not-needed",
        "import subprocess, sys\nsubprocess.run([sys.executable, __file__, 'child']) if len(sys.argv) == 1 else print('child', sys.argv[1:])",
    ),
    Case(
        "data-loader-workers",
        ["main.py"],
        {
            "main.py": LOADER,
            "data.py": "import torch\nclass Squares(torch.utils.data.Dataset):\n    def __len__(self): return 4\n    def __getitem__(self, i): return torch.tensor(i * i)\n",
        },
        torch=True,
    ),
]
