"""Benchmarks, written as JSON files that documents may quote: ``python -m dsv4.bench
{engine,ops,load,context} --help``.

Every file says on what machine, with which versions, from which commit and by which command it was
made.
"""
