"""The `metamd` command."""
