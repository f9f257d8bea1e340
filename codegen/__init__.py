"""Module to artifact: lower, build, pack, write."""
