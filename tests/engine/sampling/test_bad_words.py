"""Bad words, compared with a search through the whole output."""

import random

from sluice_server.engine.sampling.bad_words import BadWords


def test_what_would_complete_a_word_is_barred() -> None:
    rng = random.Random(1)
    for _ in range(300):
        words = [tuple(rng.choices(range(4), k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 6))]
        prompt, output = rng.choices(range(4), k=rng.randrange(4)), rng.choices(range(4), k=rng.randrange(12))
        known, ahead = rng.randrange(len(output) + 1), rng.choices(range(4), k=rng.randrange(4))
        bad = BadWords(words, prompt + output[:known], len(prompt))
        for at in range(known, len(output)):
            bad.append(output[at : at + 1])
        assert bad.num_tokens == len(prompt) + len(output)
        for more in ([], ahead):
            whole = tuple(output + more)
            begun = [word for word in words if len(word) <= len(whole) + 1]
            expected = {word[-1] for word in begun if whole[len(whole) + 1 - len(word) :] == word[:-1]}
            assert set(bad.banned(more)) == expected
