"""`python -m laplace_ella`."""

from laplace_ella.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
