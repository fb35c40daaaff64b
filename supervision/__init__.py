"""Who keeps the actors alive, and how people reach them: the tree, the engine, the commands.

Start with `app`: the whole tree is on that page.
"""


def main() -> None:
    """Run the command line and exit with its code."""
    import sys

    from callboard.supervision.cli.main import main as run

    sys.exit(run())
