"""Hosts: workers on other machines, which share no memory with the controller."""
