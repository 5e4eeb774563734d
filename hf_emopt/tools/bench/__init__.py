"""Measurements on the user's own machine; each file is one subcommand of ``hf-emopt bench``."""
