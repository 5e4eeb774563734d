"""Subcommands of ``hf-emopt`` that are more than a call: each module adds its options and runs."""
