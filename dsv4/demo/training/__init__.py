"""How the demo checkpoint is made: texts, training, publishing, evaluation. Not part of the wheel."""
