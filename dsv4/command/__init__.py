"""What all commands share: flags, errors in one line, exit codes, signals, output files, progress
(docs/commands.md).
"""
