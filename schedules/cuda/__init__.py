"""How operations run on NVIDIA GPUs."""
