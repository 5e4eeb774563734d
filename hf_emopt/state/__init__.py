"""The optimizer state of one rank: its form, its place between steps, and its swap-in."""
