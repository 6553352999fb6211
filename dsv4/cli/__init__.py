"""What the driver ``single_shot_inference.py`` is made of: arguments, prompt, progress, streamed
text and report.
"""
