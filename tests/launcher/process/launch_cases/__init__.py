"""Small programs that must not be able to tell `gemini_python` from `python`.

Add a `Case` to one of the lists: it runs under both, and output, exit status and files left must be the same.
"""

from launch_cases import command_lines, ends, imports, interpreter, main_module, source_forms, starts

ALL = [
    *main_module.CASES,
    *command_lines.CASES,
    *ends.CASES,
    *source_forms.CASES,
    *imports.CASES,
    *interpreter.CASES,
    *starts.CASES,
]
