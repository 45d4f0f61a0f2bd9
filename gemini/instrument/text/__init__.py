"""A source file and the edits made in it: bytes → text → tree, and the way back to the original positions."""
