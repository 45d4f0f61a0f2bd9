"""Runs the passes over a file and vouches for the result.

Passes are put in order by what they need. Those on one level do not need each other: they all see the same text, in
one shared `Unit`, and their edits are made together, verified together.

    level 0   a   b   c     one tree, one walk, one splice, one parse
    level 1   d             needs b: sees the text that level 0 made

Only if that fails (an overlap, a syntax error, a lost name) are the passes of the level made one by one, each verified
alone, the later seeing the text of the earlier, so that the fault is pinned on the pass that has it. That one is left
out, with a `Failed` result and one line of notice, and the user's program runs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType

from gemini.errors import PassError
from gemini.instrument.names.module_exports import Modules
from gemini.instrument.names.qualified_names import ModuleLookup
from gemini.instrument.pass_manager import pass_failure, prelude_import
from gemini.instrument.pass_manager.instrumented_file import Instrumented
from gemini.instrument.pass_manager.pass_order import levels
from gemini.instrument.pass_manager.verify_pass import verified
from gemini.instrument.passes.base import Changed, Failed, Pass, Result, Skipped
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.prefilter import can_affect
from gemini.instrument.text.edits import Edit, apply
from gemini.instrument.text.fstrings import fit
from gemini.instrument.text.parser import collector_paused, compile_tree, parser_warnings_muted
from gemini.instrument.text.positions import PositionMap, restore
from gemini.instrument.text.source_file import SourceFile

Notice = Callable[[str], None]
Wanted = tuple[Pass, tuple[Edit, ...]]

_TOO_DEEP = "the file is nested too deeply to be handled as a tree"
_UNUSABLE = (PassError, SyntaxError, ValueError, RecursionError)
"""What making and verifying edits raises where they do not leave a valid file."""


@dataclass
class _State:
    """A file on its way through the levels."""

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
        self._given_modules = modules
        self._own_modules = Modules()
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
        """The passes in the order they run; raises `PassError` for a cycle or an unknown need."""
        return tuple(one for level in self._scheduled() for one in level)

    def run(self, source: SourceFile) -> Instrumented:
        """Apply the passes to `source`. Raises only what Python itself would: the file's own `SyntaxError`."""
        with collector_paused():
            # All that is only needed on the way is gone before the collector looks at what there is.
            done, notices = self._instrument(source, self._scheduled())
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
        return Unit(source, self._given_modules or self._own_modules.beside(source))

    def _begin(self, source: SourceFile) -> _State:
        return _State(source, source, PositionMap.identity(), self._unit(source))

    def _scheduled(self) -> list[list[Pass]]:
        if self._levels is None:
            self._levels = levels(self.passes)
        return self._levels

    def _run_strictly(self, source: SourceFile, scheduled: list[list[Pass]]) -> _State:
        """The edited text parses but does not compile: find the pass to blame, or find that the file never did."""
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

    def _run(self, source: SourceFile, scheduled: list[list[Pass]], *, strict: bool) -> _State:
        state = self._begin(source)
        for level in scheduled:
            self._run_level(state, level, strict=strict)
        return state

    def _run_level(self, state: _State, level: Sequence[Pass], *, strict: bool) -> None:
        hit = [one for one in level if self._is_can_affect(one, state)]
        if not hit or not self._is_readable(state, hit):
            return
        wanted = [(one, edits) for one in hit if (edits := self._ask(one, state))]
        if not wanted or (not strict and self._together(state, wanted, strict=False)):
            return
        sound = [(one, edits) for one, edits in wanted if self._is_sound(state, one, edits, strict=strict)]
        if not self._together(state, sound, strict=strict):
            self._one_by_one(state, sound, strict=strict)

    def _together(self, state: _State, wanted: Sequence[Wanted], *, strict: bool) -> bool:
        """Make the edits of several passes at once; whether that went well."""
        try:
            self._make(state, [edit for _, edits in wanted for edit in edits], strict=strict)
        except _UNUSABLE:
            return False
        state.results.update({one.name: Changed(one.name, edits) for one, edits in wanted})
        return True

    def _one_by_one(self, state: _State, wanted: Sequence[Wanted], *, strict: bool) -> None:
        """Make the edits of one pass after the other, asking each again where the text has changed meanwhile."""
        asked = state.current
        for one, edits in wanted:
            if state.current is not asked:
                edits = self._ask(one, state)
                if not edits:
                    continue
            try:
                self._make(state, edits, strict=strict)
            except _UNUSABLE as error:
                self._fail(state, pass_failure.of_edits(one.name, state.current, error, edits))
                continue
            state.results[one.name] = Changed(one.name, edits)

    def _is_sound(self, state: _State, one: Pass, edits: tuple[Edit, ...], *, strict: bool) -> bool:
        """Whether the edits of a pass can be made where no other pass has been; notes the failure if not."""
        try:
            self._make(replace(state), edits, strict=strict)  # a copy: only the verdict counts
        except _UNUSABLE as error:
            self._fail(state, pass_failure.of_edits(one.name, state.current, error, edits))
            return False
        return True

    def _make(self, state: _State, edits: Sequence[Edit], *, strict: bool) -> None:
        """Make `edits` in the file and verify the result; the state is untouched where that fails."""
        if not edits:
            return
        place = (
            prelude_import.place(state.current)
            if prelude_import.uses(edits) and not prelude_import.is_present(state.current)
            else None
        )
        spliced = apply(state.current, [*edits, place] if place else edits)
        edited = verified(state.current, spliced)
        if strict:
            compile_tree(edited.tree, edited.path)
        state.current, state.unit = edited, self._unit(edited)
        state.positions = spliced.positions.after(state.positions)

    def _is_can_affect(self, one: Pass, state: _State) -> bool:
        if can_affect(one.triggers, state.current.text):
            return True
        state.results[one.name] = Skipped(one.name, f"the file does not mention {' or '.join(one.triggers)}")
        return False

    def _is_readable(self, state: _State, hit: list[Pass]) -> bool:
        """Whether the file parses into a tree at all: deeper nesting than `ast` allows may still compile."""
        try:
            _ = state.current.tree
        except (RecursionError, MemoryError):
            state.results.update({one.name: Skipped(one.name, _TOO_DEEP) for one in hit})
            return False
        return True

    def _ask(self, one: Pass, state: _State) -> tuple[Edit, ...]:
        """The edits a pass wants; none, with the result noted, where it does not apply or raises."""
        found: list[Edit] = []
        meant = None if _is_ours(one) else _meant(state.current)
        try:
            for edit in one.edits(state.unit):
                if not isinstance(edit, Edit):
                    raise TypeError(f"a pass gives Edit values, not {type(edit).__name__}")
                found.append(edit)
            found = self._as_they_can_be_made(found, state)
        except (Exception, SystemExit) as error:  # a pass has no say in whether the program runs
            self._fail(state, pass_failure.of_pass(one.name, state.current, error, found))
            found = []
        if meant is not None and meant != _meant(state.current):
            del state.current.__dict__["tree"]  # it is parsed anew
            state.unit = self._unit(state.current)
            self._fail(state, pass_failure.of_tree(one.name, state.current))
            return ()
        if not found:
            state.results.setdefault(one.name, Skipped(one.name, "nothing to change"))
        return tuple(found)

    def _as_they_can_be_made(self, edits: list[Edit], state: _State) -> list[Edit]:
        """The edits as this file can take them: with an import on the spot where there is no place for one, and with
        those left out, each with a line of notice, that an f-string does not take."""
        source = state.current
        if (
            prelude_import.uses(edits)
            and not prelude_import.is_present(source)
            and prelude_import.place(source) is None
        ):
            edits = prelude_import.inline(edits)
        fitted = fit(state.unit, edits)
        for edit, reason in fitted.left_out:
            state.notices.append(f"{source.path}:{edit.span.line}: {edit.reason or 'an edit'}: not done, as {reason}")
        return fitted.edits

    def _fail(self, state: _State, failed: Failed) -> None:
        state.results[failed.pass_name] = failed
        state.notices.append(failed.notice)


def _is_ours(one: Pass) -> bool:
    return type(one).__module__.partition(".")[0] == "gemini"


def _meant(source: SourceFile) -> CodeType | None:
    """What the tree compiles to: a stranger's pass may have changed the tree in place. None where it does not."""
    try:
        with parser_warnings_muted():
            return compile_tree(source.tree, source.path)
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return None


def _finish(state: _State, scheduled: list[list[Pass]]) -> Instrumented:
    results = tuple(state.results[one.name] for level in scheduled for one in level if one.name in state.results)
    if not state.changed:
        return Instrumented(state.original, state.original.text, results, state.positions)
    tree = state.current.tree
    restore(tree, state.positions)
    return Instrumented(state.original, state.current.text, results, state.positions, tree)
