"""The optimizer state of one rank: its form, where it lies, and how a step gets at it."""
