"""What the names in a file mean: scopes, imports and what other modules export."""
