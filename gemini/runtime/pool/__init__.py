"""The worker pool: spawning, supervising, interrupting and ending worker processes."""
