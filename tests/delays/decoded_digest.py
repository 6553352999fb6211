"""``python decoded_digest.py SETTINGS TOKENS``: what an engine of the ``dsv4`` in front on
``PYTHONPATH`` makes of prompts of many lengths: the package's place, and a digest of logits and
sampled tokens.

SETTINGS: those of ``EngineConfig``, as JSON. TOKENS: how many are decoded in all.
"""

import hashlib
import json
import random
import sys

import dsv4
from dsv4 import Engine, EngineConfig, SamplingParams
from dsv4.demo import CHECKPOINT

CONTEXT = 2048
LONGEST_PROMPT = 500


def main() -> None:
    settings = json.loads(sys.argv[1])
    left = int(sys.argv[2])
    engine = Engine.load(CHECKPOINT, EngineConfig(max_context=CONTEXT, **settings))
    digest = hashlib.sha256()
    draw = random.Random(0)
    seed = 0
    while left > 0:
        prompt = [
            draw.randrange(engine.config.vocab_size) for _ in range(seed % LONGEST_PROMPT + 1)
        ]
        digest.update(engine.logits(prompt[-9:]).cpu().numpy().tobytes())
        most = min(left, CONTEXT - LONGEST_PROMPT)
        sampling = SamplingParams(temperature=1.0, seed=seed)
        tokens = list(engine.generate(prompt, most, sampling, stop_token_ids=()))
        digest.update(str(tokens).encode())
        left -= len(tokens)
        seed += 97
    print(dsv4.__file__, digest.hexdigest())


if __name__ == "__main__":
    main()
