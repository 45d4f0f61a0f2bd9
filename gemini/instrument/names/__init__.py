"""Names in a file: scopes, imports, qualified names, and the exports of other modules."""
