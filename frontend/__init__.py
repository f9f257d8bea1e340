"""A file on disk becomes a Model: configuration, graph and packed weights."""
