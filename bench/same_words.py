"""Do the page and the command line say the same? Random plans, each rendered for the page and for the terminal.

    python bench/same_words.py [--plans 1000] [--seed 1] [--advised 0.1]

Every sentence of the page must stand in the text, its parts must add up as printed, and its Chinese must have no
English sentence. The exit code is 1 where one does not; sentences without Chinese are listed with their counts.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.bundled import bundled_names
from legroom.facts.gpus import all_gpus
from legroom.facts.releases import known_releases
from legroom.planning.plan import Plan
from legroom.render.plan_text import plan_text, plan_words
from legroom.render.translation import in_language
from legroom.web.endpoints.plans import plan_of_request

FLAGS: tuple[dict[str, Any], ...] = (
    {"max_model_len": 4096},
    {"max_model_len": 32768},
    {"max_num_seqs": 16},
    {"max_num_batched_tokens": 16384},
    {"gpu_memory_utilization": 0.5},
    {"gpu_memory_utilization": 0.97},
    {"kv_cache_dtype": "fp8"},
    {"enforce_eager": True},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 8},
    {"pipeline_parallel_size": 2},
    {"quantization": "fp8"},
    {"cpu_offload_gb": 8},
)
PART = re.compile(r"^  \S\S  [A-Za-z-]+(?: [A-Za-z]+)? +(-?[\d.]+) GiB +-?[\d.]+%", re.MULTILINE)
ENGLISH = re.compile(r"(?:\b[a-z]{2,}\b[ ,;:.]+){3,}")
"""Four lower-case words in a row: a sentence, and no name of a model, flag or file."""


def random_request(draw: random.Random) -> dict[str, Any]:
    """A model, a card, a release and up to three flags; most have the newest release."""
    flags = {name: value for each in draw.sample(FLAGS, draw.randrange(4)) for name, value in each.items()}
    vllm = draw.choice(known_releases()) if draw.random() < 0.4 else None
    card, gpus = draw.choice(all_gpus()).name, draw.choice((None, None, 1, 2, 8))
    return {"model": draw.choice(bundled_names()), "gpu": card, "gpus": gpus, "vllm": vllm, "flags": flags}


def sentences(words: Any) -> list[str]:
    """Every text of the page's words, the command left out."""
    if isinstance(words, dict):
        return [text for name, value in words.items() if name != "to_run" for text in sentences(value)]
    if isinstance(words, list):
        return [text for value in words for text in sentences(value)]
    return [words] if isinstance(words, str) and words else []


def flat(text: str) -> str:
    """The text in one line, without the marks at its edges."""
    return " ".join(text.replace("│", " ").split())


def differences(request: dict[str, Any], *, advice: bool) -> tuple[list[str], list[str]]:
    """What the page says and the text does not, or does not add up; and the sentences without Chinese."""
    try:
        plan = plan_of_request(request, advice=advice)
    except LegroomError:
        return [], []
    text, words = plan_text(plan), plan_words(plan)
    printed = flat(text)
    wrong = [each for each in sentences(words) if flat(each) not in printed]
    if words["to_run"] and f"$ {words['to_run'][0]}" not in printed:
        wrong.append("no command")
    wrong += sums_that_differ(text, plan)
    return wrong, [each for each in sentences(in_language(words, "zh")) if ENGLISH.search(each)]


def sums_that_differ(text: str, plan: Plan) -> list[str]:
    """The printed parts beside the printed total, where none is missing."""
    parts = [float(size) for size in PART.findall(text)]
    total = plan.layout.total_bytes / 2**30
    if " none  " in text or not parts or abs(sum(parts) - total) < 0.005 * (len(parts) + 1):
        return []
    return [f"the parts add up to {sum(parts):.2f} GiB, the card has {total:.2f} GiB"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--advised", type=float, default=0.1, help="share with a search for fixes, which takes seconds")
    args = parser.parse_args()
    draw, wrong, english = random.Random(args.seed), 0, Counter[str]()
    for _ in range(args.plans):
        request = random_request(draw)
        different, untranslated = differences(request, advice=draw.random() < args.advised)
        english.update(untranslated)
        if different:
            wrong += 1
            print(request, *(f"    {each}" for each in different), sep="\n")
    for sentence, count in english.most_common(40):
        print(f"{count:>5}  {sentence}")
    print(f"{args.plans} plans: {wrong} say something else on the page, {english.total()} sentences without Chinese")
    return bool(wrong or english)


if __name__ == "__main__":
    sys.exit(main())
