"""`python -m metamd` is the `metamd` command."""

from metamd.cli.main import main

if __name__ == "__main__":
    main()
