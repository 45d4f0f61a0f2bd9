"""The controller: the process that runs the user's program and has workers run parts of its model."""
