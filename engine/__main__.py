"""The installed command `engine`, and `python -m engine`: imports the command line and runs it.

An interrupt during the imports, which may take seconds, ends with one line and exit code 130, as during a command.
"""

import sys


def main() -> int:
    """Run one command and return its exit code."""
    try:
        from engine.cli import main as run_command
    except KeyboardInterrupt:
        print("engine: interrupted", file=sys.stderr)
        return 130
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
