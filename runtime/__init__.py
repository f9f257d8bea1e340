"""Artifact and requests become tokens; no compiler inside."""
