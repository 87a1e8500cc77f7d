"""`python -m metamd` is the `metamd` command; torchrun starts it this way."""

from metamd.cli.main import main

if __name__ == "__main__":
    main()
