"""``python -m accelpatch``: the command line."""

from accelpatch.cli import main

if __name__ == "__main__":
    main()
