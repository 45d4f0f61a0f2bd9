"""Interception: calls of managed modules are caught and take one of three paths: pipelined, eager or local."""
