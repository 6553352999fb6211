"""Caches: what a sequence owns on the devices."""
