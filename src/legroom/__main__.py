"""`python -m legroom`."""

import sys

from legroom.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
