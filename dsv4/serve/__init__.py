"""``dsv4 serve``: an OpenAI-compatible server of one sequence, for one user (docs/serve.md)."""
