"""``--interactive``: a chat with the model, whose turns feed only what is new."""
