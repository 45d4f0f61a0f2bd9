"""The graph all parts share: nodes, values as data, symbolic sizes, its interpreter and its files."""
