"""The `pdserve` command. Importing this loads nothing but the entry point."""


def main() -> None:
    """Run the command line and exit."""
    from pdserve.cli.app import run

    run()
