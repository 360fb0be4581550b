"""`python -m router` is `message-router`."""

from router.cli import main

if __name__ == "__main__":
    main()
