"""The step: what a program asks for between a call of its model and `backward()`, as data."""
