"""Makes the demo checkpoint: texts, training, publishing, evaluation. Not part of the wheel."""
