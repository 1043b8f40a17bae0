"""Intermediate representation: the typed program with its equations, paths and repairs."""
