"""The beginning of a program's process: everything as `python` would have it, then the import hook.

Runs in the user's process before the user's first statement, so it imports nothing that Python has not loaded
already; what instrumenting needs is loaded when the first module of the user's own is imported.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import BuiltinImporter
from _frozen_importlib_external import SourceFileLoader

from gemini.launcher.process.import_isolation import LibraryFirst, library_path
from gemini.launcher.torch_import_hook import arm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypedDict

    from gemini.launcher.process.import_hook import Hook
    from gemini.launcher.process.launch_session import Session

    class Plan(TypedDict):
        """What the launcher tells the new process; made of what fits into a constant of a code object."""

        kind: str
        descriptor: int | None
        opened: str
        gemini: str
        plain: list[str] | None
        file: str | None
        argv: list[str]
        orig_argv: list[str]
        path0: str | None
        compile: bytes | None
        session: Session


def boot() -> None:
    """Run `begin` with the launcher's plan; if that cannot be done, become plain `python`."""
    import posix
    import sys

    plan: Plan = globals()["PLAN"]
    try:
        if plan["descriptor"] is not None:
            posix.close(plan["descriptor"])
        else:
            posix.unlink(plan["opened"])
            posix.rmdir(plan["opened"].rpartition("/")[0])
        if not getattr(sys.flags, "safe_path", sys.flags.isolated):
            del sys.path[0]  # the folder of the file that this came in
        if "gemini" not in sys.modules:
            external = sys.modules["_frozen_importlib_external"]
            folder = plan["gemini"]
            spec = external.spec_from_file_location(
                "gemini", folder + "/__init__.py", submodule_search_locations=[folder]
            )
            sys.modules["_frozen_importlib"]._load(spec)
        from gemini.launcher.process.bootstrap import begin

        begin(plan)
    except Exception as fault:
        if plan["plain"] is None:
            raise
        sys.stderr.write(f"gemini_python: {type(fault).__name__}: {fault}; running under plain python\n")
        sys.stderr.flush()
        posix.execv(sys.executable, [sys.executable, *plan["plain"]])


def begin(plan: Plan) -> None:
    """Make this process the one that `python` would have started, and install the hook."""
    library = library_path()
    with LibraryFirst(library, users=[] if plan["path0"] is None else [plan["path0"]]):
        arm(plan["session"], install(plan["session"], library))
    _restore_sys(plan)
    _restore_main(plan)
    _compile_warnings(plan)


def begin_child(session: Session) -> None:
    """Install the hook in a process that multiprocessing has started with ``python -c``."""
    has_path0 = not getattr(sys.flags, "safe_path", sys.flags.isolated)
    path0 = sys.path[:1] if has_path0 else []
    library = [entry for entry in library_path() if entry not in path0]
    with LibraryFirst(library):
        install(session, library)


def install(session: Session, library: list[str]) -> Hook:
    """Enter `session`: hook imports, `runpy`, and the start of other processes."""
    from gemini.launcher.process import child_processes, import_hook
    from gemini.launcher.process import launch_session as sessions

    sessions.enter(session)
    installed = import_hook.Hook(session, library)
    if not import_hook.install(installed) and not session["quiet"]:
        sys.stderr.write("gemini_python: this Python's library has no source; imported modules run unchanged\n")
    child_processes.install(installed)
    return installed


def _restore_sys(plan: Plan) -> None:
    sys.argv[:] = plan["argv"]
    sys.orig_argv[:] = [sys.orig_argv[0], *plan["orig_argv"]]
    sys._xoptions.pop("gemini", None)
    safe = getattr(sys.flags, "safe_path", sys.flags.isolated)
    if plan["path0"] is not None and (plan["kind"] == "container" or not safe):
        sys.path.insert(0, plan["path0"])


def _restore_main(plan: Plan) -> None:
    main = sys.modules["__main__"].__dict__
    main["__loader__"] = BuiltinImporter
    if plan["file"] is None:
        del main["__file__"], main["__cached__"]
    else:
        main["__file__"] = plan["file"]
        if plan["kind"] == "script":
            main["__loader__"] = SourceFileLoader("__main__", plan["file"])
    if plan["kind"] == "command" and sys.version_info >= (3, 13):
        _show_command(plan["orig_argv"], len(plan["argv"]))


def _show_command(orig_argv: list[str], argument_count: int) -> None:
    """From 3.13 on a traceback shows the lines of ``-c``: Python puts them where it looks for a file's."""
    import linecache

    register: Any = getattr(linecache, "_register_code", None)
    if register is not None:
        source = orig_argv[len(orig_argv) - argument_count]
        in_frames = hasattr(linecache, "_interactive_cache")
        register(sys._getframe(4).f_code if in_frames else "<string>", source, "<string>")


def _compile_warnings(plan: Plan) -> None:
    """Compile the program as it was written, where that is known to warn, under this process's warning filters."""
    if plan["compile"] is None:
        return
    try:
        compile(plan["compile"], plan["file"] or "<string>", "exec", dont_inherit=True)
    except SyntaxError:
        if plan["plain"] is None:
            raise
        os.execv(sys.executable, [sys.executable, *plan["plain"]])


def keep_main_file() -> None:
    """See that ``__main__`` still has its ``__file__`` when exit functions run.

    Python removes the name after a program that it ran from a file, not after ``-m``. Called last by the frame that
    stands for `runpy`, this is the first of the exit functions to run.
    """
    import atexit

    main = sys.modules["__main__"].__dict__
    kept: dict[str, Any] = {name: main[name] for name in ("__file__", "__cached__") if name in main}
    atexit.register(lambda: main.update(kept))
