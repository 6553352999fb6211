"""Validation from the command line: ``python -m dsv4.validate.NAME`` (docs/validation.md)."""
