"""`python -m pdserve.cli`."""

from pdserve.cli import main

if __name__ == "__main__":
    main()
