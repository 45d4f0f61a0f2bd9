"""A source file and the edits made in it: bytes → text → tree, and the map back to the original positions."""
