"""The program's process: runs a program under Gemini as `python` would.

The program must not observe a difference: no frames of Gemini below its frames, no changed `__main__`. So the launcher
prepares the program and then replaces its process by `python`:

    gemini_python train.py --epochs 3
        program_file     the program: a source file, a container with __main__, a module, -c, standard input
        session_passes   instruments its text
        pyc_pack         its code object with a boot statement in front, in the format of a .pyc
        become_python    an unnamed file in memory; exec  python -X gemini=train.py /dev/fd/3 --epochs 3
    ─────────────────────────────────────────────────────────────────────────  same process id, new interpreter
        bootstrap        the boot statement closes that file and loads Gemini; `begin` restores __main__, sys.argv,
                         sys.path … as under `python train.py --epochs 3` and installs
        import_hook      the instrumentation of imported modules, and
        child_processes  that of spawned processes (spawned_child)
        train.py         the user's statements, in the real __main__, nothing below them on the stack

`launch` runs these steps. `python -m module` has two frames of the standard library's `runpy` below the module;
`runpy_frame` reproduces them. A program that cannot be instrumented (a syntax error, a compiled script, an unreadable
file) runs under plain `python`, which reports the error as usual.

    launch_session    the options that travel from the launcher to the process and its children
    stdlib_patch      patches one expression of a standard-library function, without a new frame
    import_isolation  separates Gemini's imports from modules of the user with the same names
"""
