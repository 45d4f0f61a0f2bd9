"""Running a program under Gemini as `python` would run it.

The program must not be able to tell. Run inside the launcher's own process it could: our frames would lie below
its own, and our modules among its own. So the launcher prepares the program and then *becomes* `python`:

    gemini_python train.py --epochs 3
        program.py     what is run: a source file, a container with __main__, a module, -c, standard input
        passes.py      its text, instrumented
        pack.py        the code object, with a first statement of ours, written as Python writes a .pyc
        process.py     into a nameless file in memory; exec  python -X gemini=train.py /dev/fd/3 --epochs 3
    ─────────────────────────────────────────────────────────────────────────  same process id, new interpreter
        boot.py        the statement of ours: closes that file, finds Gemini, and calls
        begin.py       which makes __main__, sys.argv, sys.path … what they are under `python train.py --epochs 3`
                       and installs the import hook (../program/hook.py) and children.py for processes that it starts
        train.py       the user's own statements, in the real __main__, nothing below them on the stack

`python -m module` has two frames of the standard library's `runpy` below the module; runpy_frame.py reproduces them.
Where anything is odd (a syntax error, a compiled script, a file that cannot be read) the launcher hands over to
plain `python`, which then says about it what it always says.

    session.py   what the launcher tells the new process, and what that one tells the processes it starts
"""
