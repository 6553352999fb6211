"""The parts of the driver ``single_shot_inference.py``: arguments, prompt, progress, streamed
text and report.
"""
