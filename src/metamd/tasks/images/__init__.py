"""Families of image classification."""
