"""Native kernels (tensor cores of Blackwell) and whether they are to be trusted: a child process
compares them with the portable ones before anything else launches them.
"""
