"""Guards: is this call still the one that was planned for?"""
