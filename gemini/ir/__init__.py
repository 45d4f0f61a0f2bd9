"""Intermediate representation: the captured graph, its nodes and values as data, its interpreter and its files."""
