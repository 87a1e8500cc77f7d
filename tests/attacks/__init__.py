"""Hostile files and wrong calls. Files are written by the tests, so that no binary of that kind is kept."""
