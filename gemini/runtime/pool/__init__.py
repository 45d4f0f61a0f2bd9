"""Worker pool: starting, supervising, interrupting and ending worker processes."""
