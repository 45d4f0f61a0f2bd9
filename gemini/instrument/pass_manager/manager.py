"""Pass manager: runs the passes over a file and verifies the result.

Passes run in levels by their `needs`. The passes of one level do not need each other: they read the same text, in one
shared `Unit`, and their edits are applied and verified together.

    level 0   a   b   c     one tree, one walk, one splice, one parse
    level 1   d             needs b: reads the text after level 0

If that fails (an overlap, a syntax error, a lost name), the passes of the level are applied one after another and
verified each, which identifies the faulty pass. That pass is dropped with a `Failed` result and one line of notice, and
the user's program runs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType

from gemini.errors import PassError
from gemini.instrument.names.module_exports import ModuleExports
from gemini.instrument.names.qualified_names import ModuleLookup
from gemini.instrument.pass_manager import pass_failure, prelude_import
from gemini.instrument.pass_manager.instrumented_file import Instrumented
from gemini.instrument.pass_manager.pass_order import order_in_levels
from gemini.instrument.pass_manager.verify_pass import verify_edited
from gemini.instrument.passes.base import Changed, Failed, Pass, Result, Skipped
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.prefilter import can_affect
from gemini.instrument.text.edits import Edit, apply_edits
from gemini.instrument.text.fstrings import fit_to_fstrings
from gemini.instrument.text.parser import compile_tree, mute_parser_warnings, pause_collector
from gemini.instrument.text.positions import PositionMap, restore
from gemini.instrument.text.source_file import SourceFile

Notice = Callable[[str], None]
Wanted = tuple[Pass, tuple[Edit, ...]]

_TOO_DEEP = "the file is nested too deeply to be handled as a tree"
_UNUSABLE = (PassError, SyntaxError, ValueError, RecursionError)
"""The exceptions of edits that do not leave a valid file."""


@dataclass
class _FileState:
    """A file between two levels."""

    original: SourceFile
    current: SourceFile
    positions: PositionMap
    unit: Unit
    results: dict[str, Result] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        return self.current is not self.original


class PassManager:
    """Passes and the order they run in; `run` applies them to one file."""

    def __init__(
        self, passes: Iterable[Pass] = (), *, notice: Notice | None = None, modules: ModuleLookup | None = None
    ) -> None:
        self._passes: dict[str, Pass] = {}
        self._levels: list[list[Pass]] | None = None
        self._notice = notice
        self._modules = modules
        self._default_modules = ModuleExports()
        for one in passes:
            self.add(one)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, in the order they were added."""
        return tuple(self._passes.values())

    def add(self, one: Pass) -> None:
        """Add a pass; its name must be new."""
        if not one.name:
            raise PassError(f"{type(one).__qualname__} has no name\n    → give the class a `name`")
        if one.name in self._passes:
            raise PassError(
                f"two passes are called {one.name!r}\n    → rename one, or skip it with --skip-pass {one.name}"
            )
        self._passes[one.name] = one
        self._levels = None

    def schedule(self) -> tuple[Pass, ...]:
        """Return the passes in the order they run; raise `PassError` for a cycle or an unknown need."""
        return tuple(one for level in self._ordered_levels() for one in level)

    def run(self, source: SourceFile) -> Instrumented:
        """Apply the passes to `source`; raises only the `SyntaxError` that Python would raise for it."""
        with pause_collector():
            # Temporary objects are released before the collector runs again.
            done, notices = self._instrument(source, self._ordered_levels())
        if self._notice is not None:
            for line in notices:
                self._notice(line)
        return done

    def _instrument(self, source: SourceFile, scheduled: list[list[Pass]]) -> tuple[Instrumented, list[str]]:
        state = self._run(source, scheduled, strict=False)
        done = _finish(state, scheduled)
        if done.changed:
            try:
                done.code()
            except (SyntaxError, ValueError, RecursionError):
                state = self._run_strictly(source, scheduled)
                done = _finish(state, scheduled)
        return done, state.notices

    def _unit(self, source: SourceFile) -> Unit:
        return Unit(source, self._modules or self._default_modules.beside(source))

    def _begin(self, source: SourceFile) -> _FileState:
        return _FileState(source, source, PositionMap.identity(), self._unit(source))

    def _ordered_levels(self) -> list[list[Pass]]:
        if self._levels is None:
            self._levels = order_in_levels(self.passes)
        return self._levels

    def _run_strictly(self, source: SourceFile, scheduled: list[list[Pass]]) -> _FileState:
        """Find the faulty pass of a text that parses but does not compile, unless the original does not compile."""
        try:
            compile_tree(source.tree, source.path)
        except RecursionError:
            reason = _TOO_DEEP
        except (SyntaxError, ValueError):
            reason = "the file itself does not compile"
        else:
            return self._run(source, scheduled, strict=True)
        state = self._begin(source)
        state.results = {one.name: Skipped(one.name, reason) for level in scheduled for one in level}
        return state

    def _run(self, source: SourceFile, scheduled: list[list[Pass]], *, strict: bool) -> _FileState:
        state = self._begin(source)
        for level in scheduled:
            self._run_level(state, level, strict=strict)
        return state

    def _run_level(self, state: _FileState, level: Sequence[Pass], *, strict: bool) -> None:
        hit = [one for one in level if self._can_affect(one, state)]
        if not hit or not self._is_readable(state, hit):
            return
        wanted = [(one, edits) for one in hit if (edits := self._collect_edits(one, state))]
        if not wanted or (not strict and self._apply_together(state, wanted, strict=False)):
            return
        sound = [(one, edits) for one, edits in wanted if self._is_sound(state, one, edits, strict=strict)]
        if not self._apply_together(state, sound, strict=strict):
            self._apply_each(state, sound, strict=strict)

    def _apply_together(self, state: _FileState, wanted: Sequence[Wanted], *, strict: bool) -> bool:
        """Apply the edits of several passes at once; return whether the result is valid."""
        try:
            self._apply(state, [edit for _, edits in wanted for edit in edits], strict=strict)
        except _UNUSABLE:
            return False
        state.results.update({one.name: Changed(one.name, edits) for one, edits in wanted})
        return True

    def _apply_each(self, state: _FileState, wanted: Sequence[Wanted], *, strict: bool) -> None:
        """Apply the edits of one pass after another; a pass runs again where the text has changed meanwhile."""
        first = state.current
        for one, edits in wanted:
            if state.current is not first:
                edits = self._collect_edits(one, state)
                if not edits:
                    continue
            try:
                self._apply(state, edits, strict=strict)
            except _UNUSABLE as error:
                self._fail(state, pass_failure.of_edits(one.name, state.current, error, edits))
                continue
            state.results[one.name] = Changed(one.name, edits)

    def _is_sound(self, state: _FileState, one: Pass, edits: tuple[Edit, ...], *, strict: bool) -> bool:
        """Return whether the edits of a pass are valid on their own; record the failure if not."""
        try:
            self._apply(replace(state), edits, strict=strict)  # on a copy of the state
        except _UNUSABLE as error:
            self._fail(state, pass_failure.of_edits(one.name, state.current, error, edits))
            return False
        return True

    def _apply(self, state: _FileState, edits: Sequence[Edit], *, strict: bool) -> None:
        """Apply `edits` and verify the result; the state is unchanged if that fails."""
        if not edits:
            return
        place = (
            prelude_import.place(state.current)
            if prelude_import.uses(edits) and not prelude_import.is_present(state.current)
            else None
        )
        spliced = apply_edits(state.current, [*edits, place] if place else edits)
        edited = verify_edited(state.current, spliced)
        if strict:
            compile_tree(edited.tree, edited.path)
        state.current, state.unit = edited, self._unit(edited)
        state.positions = spliced.positions.after(state.positions)

    def _can_affect(self, one: Pass, state: _FileState) -> bool:
        if can_affect(one.triggers, state.current.text):
            return True
        state.results[one.name] = Skipped(one.name, f"the file does not mention {' or '.join(one.triggers)}")
        return False

    def _is_readable(self, state: _FileState, hit: list[Pass]) -> bool:
        """Return whether the file has a tree: source nested deeper than `ast` allows may still compile."""
        try:
            _ = state.current.tree
        except (RecursionError, MemoryError):
            state.results.update({one.name: Skipped(one.name, _TOO_DEEP) for one in hit})
            return False
        return True

    def _collect_edits(self, one: Pass, state: _FileState) -> tuple[Edit, ...]:
        """Return the edits of a pass; none, with a result, where it does not apply or raises."""
        found: list[Edit] = []
        code_before = None if _is_built_in(one) else _compile_or_none(state.current)
        try:
            for edit in one.edits(state.unit):
                if not isinstance(edit, Edit):
                    raise TypeError(f"a pass yields Edit values, not {type(edit).__name__}")
                found.append(edit)
            found = self._adapt_edits(found, state)
        except (Exception, SystemExit) as error:  # a faulty pass must not stop the program
            self._fail(state, pass_failure.of_pass(one.name, state.current, error, found))
            found = []
        if code_before is not None and code_before != _compile_or_none(state.current):
            del state.current.__dict__["tree"]  # parsed again on access
            state.unit = self._unit(state.current)
            self._fail(state, pass_failure.of_tree(one.name, state.current))
            return ()
        if not found:
            state.results.setdefault(one.name, Skipped(one.name, "nothing to change"))
        return tuple(found)

    def _adapt_edits(self, edits: list[Edit], state: _FileState) -> list[Edit]:
        """Adapt edits to the file.

        The import is inlined where the prelude has no place; edits that an f-string does not allow are dropped.
        """
        source = state.current
        if (
            prelude_import.uses(edits)
            and not prelude_import.is_present(source)
            and prelude_import.place(source) is None
        ):
            edits = prelude_import.inline(edits)
        fitted = fit_to_fstrings(state.unit, edits)
        for edit, reason in fitted.left_out:
            state.notices.append(
                f"{source.path}:{edit.span.line}: {edit.reason or 'an edit'}: dropped, because {reason}"
            )
        return fitted.edits

    def _fail(self, state: _FileState, failed: Failed) -> None:
        state.results[failed.pass_name] = failed
        state.notices.append(failed.notice)


def _is_built_in(one: Pass) -> bool:
    return type(one).__module__.partition(".")[0] == "gemini"


def _compile_or_none(source: SourceFile) -> CodeType | None:
    """Compile the tree, to detect a plugin pass that changes it in place; None where it does not compile."""
    try:
        with mute_parser_warnings():
            return compile_tree(source.tree, source.path)
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return None


def _finish(state: _FileState, scheduled: list[list[Pass]]) -> Instrumented:
    results = tuple(state.results[one.name] for level in scheduled for one in level if one.name in state.results)
    if not state.changed:
        return Instrumented(state.original, state.original.text, results, state.positions)
    tree = state.current.tree
    restore(tree, state.positions)
    return Instrumented(state.original, state.current.text, results, state.positions, tree)
