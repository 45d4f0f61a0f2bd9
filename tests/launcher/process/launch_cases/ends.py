"""Ways in which a program ends."""

# ruff: noqa: E501 - a program a line reads better than a program over many

from launching import script

EXIT = "import sys, atexit\natexit.register(lambda: print('first in'))\natexit.register(lambda: print('last in', __file__))\n"

CASES = [
    script("end", EXIT),
    script("exit-number", EXIT + "sys.exit(3)"),
    script("exit-none", EXIT + "sys.exit()"),
    script("exit-text", EXIT + "sys.exit('a message')"),
    script("exit-object", EXIT + "sys.exit([1, 2])"),
    script("exit-large", "import sys; sys.exit(259)"),
    script("exit-negative", "import sys; sys.exit(-1)"),
    script("exit-true", "raise SystemExit(True)"),
    script("exit-builtin", "exit(4)"),
    script("exit-at-once", "import os; print('lost'); os._exit(7)"),
    script("exit-in-atexit", "import atexit, os\natexit.register(lambda: os._exit(9))"),
    script(
        "exit-in-thread", "import threading, sys\nt = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()"
    ),
    script("raise", EXIT + "def f(x):\n    return {}[x]\n\nprint(f('a') +\n      f('b'))"),
    script("raise-at-line-one", "1/0"),
    script("raise-in-first-line-after-docstring", '"""D."""; 1/0'),
    script("raise-multiline", "x = [\n    1,\n    2 / 0,\n]"),
    script("raise-wide-characters", "é = '😀'; print(é + 'ü' + 1 + '漢字')"),
    script("raise-chained", "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('second') from e"),
    script("raise-in-handler", "try:\n    1/0\nexcept ZeroDivisionError:\n    int('x')"),
    script("raise-group", "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])", since=(3, 11)),
    script("raise-note", "e = ValueError('x'); e.add_note('a note'); raise e", since=(3, 11)),
    script("raise-own-class", "class Mine(Exception): pass\nraise Mine('x')"),
    script("raise-recursion", "def f(): f()\nf()"),
    script("raise-name-suggestion", "import sys\nsys.exitt(1)"),
    script("raise-in-atexit", "import atexit\n@atexit.register\ndef f(): 1/0"),
    script(
        "raise-in-thread", "import threading\nt = threading.Thread(target=lambda: 1/0, name='T'); t.start(); t.join()"
    ),
    script("raise-in-del", "class A:\n    def __del__(self): 1/0\na = A()\ndel a\nprint('on')"),
    script(
        "excepthook", "import sys\nsys.excepthook = lambda *a: print('mine', a[0], a[2].tb_lineno, a[2].tb_next)\n1/0"
    ),
    script(
        "traceback-module",
        "import traceback\ntry:\n    1/0\nexcept Exception as e:\n    traceback.print_exc()\n    print(traceback.extract_tb(e.__traceback__))\ntraceback.print_stack()",
    ),
    script("keyboard-interrupt", EXIT + "raise KeyboardInterrupt"),
    script("signal-int", EXIT + "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('never')"),
    script(
        "signal-int-handled",
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('handled')",
    ),
    script("signal-term", "import os, signal, sys\nprint('x', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)"),
    script("signal-kill", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
    script(
        "signal-handlers",
        "import signal\nprint([(s.name, str(signal.getsignal(s))) for s in signal.Signals if signal.getsignal(s) is not signal.SIG_DFL])\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    ),
    script("abort", "import os; os.abort()"),
    script(
        "faulthandler",
        "import faulthandler, sys\nfaulthandler.enable()\nfaulthandler.dump_traceback()\nimport ctypes\nctypes.string_at(0)",
    ),
    script(
        "broken-pipe",
        "import sys, os\nr, w = os.pipe(); os.close(r)\ntry:\n    os.write(w, b'x')\nexcept BrokenPipeError:\n    print('broken pipe')",
    ),
    script("closed-stdout", "import sys\nprint('x')\nsys.stdout.close()"),
    script(
        "exec-again",
        "import os, sys\nif 'again' in sys.argv:\n    print('again', sys.argv)\nelse:\n    os.execv(sys.executable, [sys.executable] + sys.argv + ['again'])",
    ),
    script(
        "exec-original-arguments",
        "import os, sys\nif 'AGAIN' in os.environ:\n    print('again', sys.argv)\nelse:\n    os.environ['AGAIN'] = '1'\n    os.execv(sys.executable, [sys.executable] + sys.orig_argv[1:])",
        "x",
    ),
    script("finalization", "import sys\nclass A:\n    def __del__(self): print('del', __name__)\na = A()"),
    script(
        "async-raise", "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    1/0\nasyncio.run(main())"
    ),
    script("generator-raise", "def g():\n    yield 1\n    raise KeyError('x')\nprint(list(g()))"),
    script("no-newline-at-end-raise", "def f():\n\traise ValueError\nf()"),
]
