"""The commands: `gemini_python`, the launcher, and `gemini` with its sub-commands."""
