"""How schedules are searched: one method a file, all working on a `Problem` in integer time."""
