"""The run time: one controller, which runs the user's program, and workers that run parts of its model."""
