"""Search methods for schedules, one per file, on a `PlacementProblem` in integer time."""
