"""Pass manager: finds passes, orders them, runs them over a file and verifies the result."""
