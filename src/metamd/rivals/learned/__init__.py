"""Rivals that are themselves learned on the family."""
