"""What a file must give: the hits of a plain simulation, and a tokenizer that anybody can follow."""

import json
from collections import OrderedDict


def hits_of(prompts, block_size, capacity=None):
    """Return the blocks of prompts (tokens, in order of arrival) that hit as a leading run, of `capacity` in all.

    Only full blocks are cached, each under all tokens up to its end. A request that names more blocks than fit is not
    stored.
    """
    cache = OrderedDict()
    num_hits = 0
    for prompt in prompts:
        ends = range(block_size, len(prompt) + 1, block_size)
        blocks = [tuple(prompt[:end]) for end in ends]
        run = 0
        while run < len(blocks) and blocks[run] in cache:
            run += 1
        num_hits += run
        # The first block of a prompt is used last, so that a prefix outlives what follows it.
        for block in reversed([block for block in blocks if block in cache]):
            cache.move_to_end(block)
        missing = [block for block in blocks if block not in cache]
        if capacity is not None and len(blocks) > capacity:
            continue
        while capacity is not None and len(cache) + len(missing) > capacity:
            victim = next(block for block in cache if block not in blocks)
            del cache[victim]
        cache.update(dict.fromkeys(missing))
        for block in reversed(blocks):
            cache.move_to_end(block)
    return num_hits


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def words(prompt):
    """Stand for a tokenizer: a token for each word of a text, or of a chat's messages."""
    text = prompt if isinstance(prompt, str) else " ".join(f"{one['role']} {one['content']}" for one in prompt)
    return [int.from_bytes(word.encode()[-3:], "little") for word in text.split()]
