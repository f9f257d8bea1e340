"""`xpuc`, and `python -m xpuc`."""

import signal


def main() -> None:
    """Run the command line of this process."""
    started_with = signal.getsignal(signal.SIGINT)
    if started_with is signal.default_int_handler:
        # Until the command is there, Ctrl-C has nothing to end in order: no traceback of imports.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from xpuc import cli

    signal.signal(signal.SIGINT, started_with)
    cli.main()


if __name__ == "__main__":
    main()
