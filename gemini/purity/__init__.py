"""Purity: is the code of a model a function of its tensors, torch's generators and values that it owns?"""
