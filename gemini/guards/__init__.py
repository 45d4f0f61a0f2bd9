"""Guards: is this call still the one that was planned? `ChangeGuard.check` returns a reason, or None."""
