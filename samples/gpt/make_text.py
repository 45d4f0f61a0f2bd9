"""Writes text.txt: prose about a harbour town, by a small grammar. The same text every time."""

import random
import re
from pathlib import Path

GRAMMAR = {
    "paragraph": ["{opening} {sentence} {sentence} {sentence} {closing}", "{sentence} {sentence} {speech} {sentence}"],
    "opening": [
        "In the {season}, when {weather}, {person} went down to {place}.",
        "It was the year of {event}, and {weather}.",
        "Nobody in the town remembered {event} as well as {person} did.",
        "Every morning {person} {walked} past {place} before {weather}.",
    ],
    "sentence": [
        "{person} {walked} along {place} and {saw} {thing}.",
        "{thing} {stood} by {place}, as it had since {event}.",
        "When {weather}, {person} {saw} {thing} from {place}.",
        "The {folk} of {place} said that {thing} belonged to {person}.",
        "There was {thing} in {place}, and beside it {thing}.",
        "{person} had {made} {thing} for {person}, but {weather}.",
        "For a long time {person} {thought} of {event}.",
    ],
    "speech": [
        '"{claim}," said {person}, and {walked} away.',
        '{person} looked at {thing} and asked, "{question}"',
        '"{question}" asked {person}. "{claim}," said {person}.',
    ],
    "claim": ["{thing} is worth more than {thing}", "the sea gives back what it takes", "we saw {event} before"],
    "question": ["Who left {thing} at {place}?", "Was that before {event}?", "Do you still have {thing}?"],
    "closing": [
        "So the {season} passed, and {thing} was forgotten.",
        "And {person} never spoke of {event} again.",
        "After that, {weather} for nine days.",
    ],
    "person": ["old Marten", "the baker", "Ilse", "the lighthouse keeper", "her brother", "a stranger", "the ferryman",
               "young Tomas", "the widow", "the clockmaker"],
    "place": ["the harbour", "the fish market", "the north pier", "the mill", "the narrow bridge", "the churchyard",
              "the salt meadows", "the inn", "the rope walk", "the lighthouse"],
    "thing": ["a lantern of green glass", "the broken oar", "a letter without a name", "the silver bell", "a grey cat",
              "an empty boat", "the blue door", "a basket of apples", "the captain's chair", "a map of the islands"],
    "event": ["the great storm", "the long frost", "the fire at the mill", "the wedding on the ice", "the last whale",
              "the night of the two moons"],
    "weather": ["the fog came in", "rain fell on the roofs", "the wind turned east", "the tide was low",
                "snow lay on the nets", "the gulls were silent"],
    "season": ["spring", "summer", "autumn", "winter"],
    "folk": ["people", "children", "sailors", "women"],
    "walked": ["walked", "hurried", "wandered", "went slowly"],
    "saw": ["saw", "found", "noticed", "remembered"],
    "stood": ["stood", "lay", "waited", "was kept"],
    "made": ["carved", "mended", "bought", "hidden"],
    "thought": ["thought", "dreamed", "spoke", "told stories"],
}  # fmt: skip


SENTENCES = {"opening", "sentence", "speech", "claim", "question", "closing"}


def expand(symbol, chance):
    text = chance.choice(GRAMMAR[symbol])
    text = re.sub(r"\{(\w+)\}", lambda found: expand(found.group(1), chance), text)
    return re.sub(r"[A-Za-z]", lambda found: found.group().upper(), text, count=1) if symbol in SENTENCES else text


def make(size=50_000, seed=7):
    chance = random.Random(seed)
    paragraphs = []
    while sum(map(len, paragraphs)) < size:
        paragraphs.append(expand("paragraph", chance))
    return "\n\n".join(paragraphs) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("text.txt").write_text(make(), encoding="utf-8")
