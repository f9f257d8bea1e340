"""`python -m xpuc`."""

from xpuc.cli import main

main()
