"""Several devices: which owns what, and how tensors pass between them."""
