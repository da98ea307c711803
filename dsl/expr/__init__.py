"""Expressions of the language: the typed tree, its types, constant folding, and (later stages) its printers."""
