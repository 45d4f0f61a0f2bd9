"""Worker: the code that runs in a worker process. It imports nothing of the controller."""
