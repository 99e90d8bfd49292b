"""`python -m regimen COMMAND ...`: as the command `regimen`."""

from regimen.scripts.commands import main

if __name__ == "__main__":
    main()
