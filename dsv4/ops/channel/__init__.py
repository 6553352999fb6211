"""What devices of a pipeline send each other in a decode step (docs/decode.md#between-devices)."""
