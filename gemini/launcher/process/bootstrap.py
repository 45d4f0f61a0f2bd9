"""Bootstrap of a program's process: restores the state that `python` would have, and installs the import hook.

`boot` is the statement in front of the user's first one. Only its code object travels, to an interpreter in which the
folder of that file is first on `sys.path` and modules of Gemini may be shadowed. So it imports nothing by search: it
loads Gemini from the folder of the launcher, and calls `begin`.

This module runs before the user's first statement: it imports only modules that Python has already loaded. The pass
manager is loaded when the first module of the user is imported.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import BuiltinImporter
from _frozen_importlib_external import SourceFileLoader

from gemini.launcher import tensorflow_import_hook, torch_import_hook
from gemini.launcher.process import misplaced_options
from gemini.launcher.process.import_isolation import LibraryFirst, library_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypedDict

    from gemini.launcher.process.import_hook import ImportHook
    from gemini.launcher.process.launch_session import Session

    class BootPlan(TypedDict):
        """The launcher's data for the new process, of types that fit into a constant of a code object."""

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
    """Run `begin` with the launcher's plan; on an error, exec plain `python`."""
    import posix
    import sys

    plan: BootPlan = globals()["PLAN"]
    try:
        if plan["descriptor"] is not None:
            posix.close(plan["descriptor"])
        else:
            posix.unlink(plan["opened"])
            posix.rmdir(plan["opened"].rpartition("/")[0])
        if not getattr(sys.flags, "safe_path", sys.flags.isolated):
            del sys.path[0]  # the folder of the packed program
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


def begin(plan: BootPlan) -> None:
    """Restore the state of a process that `python` has started, and install the hooks."""
    library = library_path()
    with LibraryFirst(library, users=[] if plan["path0"] is None else [plan["path0"]]):
        hook = install(plan["session"], library)
        torch_import_hook.install_hook(plan["session"], hook)
        tensorflow_import_hook.install_hook(plan["session"], hook)
        misplaced_options.install_hook(hook, plan["argv"])
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


def install(session: Session, library: list[str]) -> ImportHook:
    """Enter `session`: hook imports, `runpy`, and the start of child processes."""
    from gemini.launcher.process import child_processes, import_hook
    from gemini.launcher.process import launch_session as sessions

    sessions.enter(session)
    installed = import_hook.ImportHook(session, library)
    if not import_hook.install(installed) and not session["quiet"]:
        sys.stderr.write("gemini_python: the standard library has no source; imported modules are not instrumented\n")
    child_processes.install(installed)
    return installed


def _restore_sys(plan: BootPlan) -> None:
    sys.argv[:] = plan["argv"]
    sys.orig_argv[:] = [sys.orig_argv[0], *plan["orig_argv"]]
    sys._xoptions.pop("gemini", None)
    safe = getattr(sys.flags, "safe_path", sys.flags.isolated)
    if plan["path0"] is not None and (plan["kind"] == "container" or not safe):
        sys.path.insert(0, plan["path0"])


def _restore_main(plan: BootPlan) -> None:
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
    """Register the lines of ``-c`` with `linecache`, as Python does from 3.13 on for tracebacks."""
    import linecache

    register: Any = getattr(linecache, "_register_code", None)
    if register is not None:
        source = orig_argv[len(orig_argv) - argument_count]
        in_frames = hasattr(linecache, "_interactive_cache")
        register(sys._getframe(4).f_code if in_frames else "<string>", source, "<string>")


def _compile_warnings(plan: BootPlan) -> None:
    """Compile the original program, if that is known to warn, under this process's warning filters."""
    if plan["compile"] is None:
        return
    try:
        compile(plan["compile"], plan["file"] or "<string>", "exec", dont_inherit=True)
    except SyntaxError:
        if plan["plain"] is None:
            raise
        os.execv(sys.executable, [sys.executable, *plan["plain"]])


def keep_main_file() -> None:
    """Restore ``__main__.__file__`` before exit functions run.

    Python removes the name after a program that it ran from a file, not after ``-m``. The `runpy` frame calls this
    last, so its exit function is the first to run.
    """
    import atexit

    main = sys.modules["__main__"].__dict__
    names: dict[str, Any] = {name: main[name] for name in ("__file__", "__cached__") if name in main}
    atexit.register(lambda: main.update(names))
