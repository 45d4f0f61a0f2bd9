"""The user's own files that a program is made of, and how they are instrumented when imported."""
