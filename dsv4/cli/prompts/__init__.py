"""``--prompts``: the lines of a file are answered one after another by an engine that is loaded
once.
"""
