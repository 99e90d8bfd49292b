"""The command line: arguments, output, errors and exit codes."""
