"""The version, in a file of its own so that the build and `metamd --version` read it without torch."""

__version__ = "0.1.0"
