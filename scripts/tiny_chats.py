"""The chats the built-in model and the built-in data are made of.

Everything here is generated from a `random.Random` that the caller seeds, so the same seed gives
the same chats on every machine. `make_tiny_model.py` pre-trains on what a *noisy demonstrator*
says: about half of its sums are wrong. `make_tiny_data.py` writes clean answers, pairs of a right
and a wrong answer, and problems with their answers: what a recipe needs to repair the model.

A fixed share of the problems is held out by a hash of the problem itself (`Problem.held_out`): no
pre-training chat and no training row contains one, and the test file contains nothing else.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

Message = dict[str, str]

MAX_OPERAND = 99
MAX_FACTOR = 9
HELD_OUT_ONE_IN = 12
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a careful assistant.", "Answer briefly.")


@dataclass(frozen=True)
class Problem:
    """Two whole numbers and an operator; the answer is never negative."""

    left: int
    operator: str
    """One of `+`, `-`, `*`."""
    right: int

    @property
    def answer(self) -> int:
        if self.operator == "+":
            return self.left + self.right
        if self.operator == "-":
            return self.left - self.right
        return self.left * self.right

    @property
    def expression(self) -> str:
        return f"{self.left} {self.operator} {self.right}"

    @property
    def held_out(self) -> bool:
        """True if the problem is on the test side; `3 + 14` and `14 + 3` are on the same side."""
        if self.operator == "*" or max(self.left, self.right) < 10:
            return False
        operands = (self.left, self.right)
        if self.operator == "+":
            operands = (min(operands), max(operands))
        digest = hashlib.sha256(f"{operands[0]}{self.operator}{operands[1]}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def draw_problem(rng: random.Random, *, held_out: bool) -> Problem:
    """A random problem of the wanted side: additions, subtractions and a few times tables."""
    while True:
        kind = rng.random()
        if kind < 0.1:
            problem = Problem(rng.randint(0, MAX_FACTOR), "*", rng.randint(0, MAX_FACTOR))
        else:
            largest = rng.choice((9, 20, 50, MAX_OPERAND, MAX_OPERAND, MAX_OPERAND))
            left, right = rng.randint(0, largest), rng.randint(0, largest)
            problem = (
                Problem(left, "+", right)
                if kind < 0.55
                else Problem(max(left, right), "-", min(left, right))
            )
        if problem.held_out == held_out:
            return problem


_QUESTIONS = {
    "+": (
        "What is {a} + {b}?",
        "{a} + {b} = ?",
        "{a} + {b}",
        "Calculate {a} + {b}.",
        "How much is {a} plus {b}?",
        "Add {a} and {b}.",
    ),
    "-": (
        "What is {a} - {b}?",
        "{a} - {b} = ?",
        "{a} - {b}",
        "Calculate {a} - {b}.",
        "How much is {a} minus {b}?",
        "Take {b} from {a}.",
    ),
    "*": (
        "What is {a} * {b}?",
        "{a} * {b} = ?",
        "{a} * {b}",
        "Calculate {a} * {b}.",
        "How much is {a} times {b}?",
        "Multiply {a} by {b}.",
    ),
}
_STORIES = {
    "+": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "There are {a} {things} on the table and {b} in the box. How many {things} are there?",
    ),
    "-": (
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "There were {a} {things} on the table. {name} took {b}. How many {things} are left?",
    ),
}
_NAMES = ("Ana", "Ben", "Cora", "Dan", "Eva", "Finn", "Lea", "Max", "Mia", "Tom")
_THINGS = ("apples", "books", "cards", "coins", "eggs", "nuts", "pens", "shells")

ANSWER_STYLES = ("The answer is {n}.", "It is {n}.", "{n}", "{expression} = {n}", "I get {n}.")
CLEAN_STYLE = ANSWER_STYLES[0]


def question(problem: Problem, rng: random.Random) -> str:
    """The problem in one of its phrasings."""
    return rng.choice(_QUESTIONS[problem.operator]).format(a=problem.left, b=problem.right)


def draw_story(rng: random.Random) -> tuple[Problem, str]:
    """A problem with small numbers, never a held-out one, and the story that asks it."""
    while True:
        left, right = rng.randint(1, 20), rng.randint(1, 20)
        problem = (
            Problem(left, "+", right)
            if rng.random() < 0.5
            else Problem(max(left, right), "-", min(left, right))
        )
        if not problem.held_out:
            break
    story = rng.choice(_STORIES[problem.operator])
    text = story.format(
        a=problem.left, b=problem.right, name=rng.choice(_NAMES), things=rng.choice(_THINGS)
    )
    return problem, text


def reply(problem: Problem, number: int, style: str) -> str:
    """What the assistant says when it believes that `number` is the answer."""
    return style.format(n=number, expression=problem.expression)


def near_miss(answer: int, rng: random.Random) -> int:
    """A wrong answer of the kind the noisy demonstrator gives.

    One too many is as frequent as one too few: otherwise a policy could improve its preferences by
    answering lower numbers, without knowing what is right.
    """
    while True:
        kind = rng.random()
        if kind < 0.8:
            wrong = answer + rng.choice((-1, 1))
        elif kind < 0.9:
            wrong = answer + rng.choice((-10, 10))
        elif kind < 0.95:
            wrong = answer + rng.choice((-2, 2))
        else:
            wrong = int(str(answer)[::-1])
        if wrong >= 0 and wrong != answer:
            return wrong


_CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
}
_COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "a carrot": "orange",
    "blood": "red",
    "a plum": "purple",
    "chocolate": "brown",
}
_SOUNDS = {
    "cat": "meows",
    "dog": "barks",
    "cow": "moos",
    "duck": "quacks",
    "lion": "roars",
    "bee": "buzzes",
}
_LEGS = {
    "cat": 4,
    "dog": 4,
    "cow": 4,
    "duck": 2,
    "lion": 4,
    "bee": 6,
    "spider": 8,
    "hen": 2,
    "snake": 0,
    "horse": 4,
}
_OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "day": "night",
    "fast": "slow",
    "old": "new",
    "wet": "dry",
}
# fmt: off
_WORDS = (
    "apple", "bird", "book", "cat", "cloud", "dog", "door", "duck", "fish", "fox", "game",
    "green", "hand", "hat", "house", "key", "lamp", "leaf", "light", "milk", "moon", "music",
    "night", "paper", "pen", "rain", "red", "river", "road", "salt", "sand", "sea", "snow",
    "song", "star", "stone", "sun", "table", "tree", "water", "wind", "wood",
)
# fmt: on
_TALK = {
    "Hello!": ("Hello! How can I help you?", "Hi there! What can I do for you?", "Hello!"),
    "Hi": ("Hi! How can I help you?", "Hello! What can I do for you?", "Hi!"),
    "Good morning!": ("Good morning! How can I help you?", "Good morning!"),
    "How are you?": ("I am fine, thank you. And you?", "Very well, thank you!", "I am fine."),
    "Who are you?": ("I am a tiny language model.", "I am a small assistant. I like sums."),
    "What can you do?": (
        "I can add and subtract small numbers.",
        "I can do small sums and chat a little.",
    ),
    "Thank you!": ("You are welcome!", "My pleasure!", "You are welcome."),
    "Goodbye!": ("Goodbye! Have a nice day.", "Goodbye!", "See you soon!"),
    "Tell me a joke.": (
        "Why was six afraid of seven? Because seven ate nine.",
        "I only know sums, sorry.",
    ),
    "Do you like music?": ("Yes, I like music.", "I like it very much."),
    "What is your name?": ("My name is Tiny.", "You can call me Tiny."),
    "I am sad.": ("I am sorry to hear that.", "Oh no. Can I help you?"),
}


def draw_fact(rng: random.Random) -> tuple[str, str]:
    """A question about a fact and its answer."""
    kind = rng.randrange(5)
    if kind == 0:
        country, capital = rng.choice(list(_CAPITALS.items()))
        asked = rng.choice(("What is the capital of {}?", "Name the capital of {}.")).format(
            country
        )
        return asked, rng.choice(
            (f"The capital of {country} is {capital}.", f"{capital}.", f"It is {capital}.")
        )
    if kind == 1:
        thing, colour = rng.choice(list(_COLOURS.items()))
        return f"What colour is {thing}?", rng.choice(
            (f"{thing.capitalize()} is {colour}.", f"It is {colour}.")
        )
    if kind == 2:
        animal, sound = rng.choice(list(_SOUNDS.items()))
        return f"What does a {animal} do?", f"A {animal} {sound}."
    if kind == 3:
        animal, legs = rng.choice(list(_LEGS.items()))
        return f"How many legs does a {animal} have?", rng.choice(
            (f"A {animal} has {legs} legs.", f"{legs}")
        )
    word, opposite = rng.choice(list(_OPPOSITES.items()))
    return f"What is the opposite of {word}?", rng.choice(
        (f"The opposite of {word} is {opposite}.", f"{opposite}")
    )


def draw_word_game(rng: random.Random) -> tuple[str, str]:
    """Something to do with a word or a row of numbers, and the result."""
    word, kind = rng.choice(_WORDS), rng.randrange(5)
    if kind == 0:
        return f"Say {word}.", word
    if kind == 1:
        return f"Write {word} in capital letters.", word.upper()
    if kind == 2:
        return f"Write {word} backwards.", word[::-1]
    if kind == 3:
        return f"Spell {word}.", "-".join(word)
    first = rng.randint(0, 40)
    last = first + rng.randint(2, 6)
    return f"Count from {first} to {last}.", ", ".join(
        str(number) for number in range(first, last + 1)
    )


def draw_talk(rng: random.Random) -> tuple[str, str]:
    """A line of small talk and a friendly answer."""
    said, answers = rng.choice(list(_TALK.items()))
    return said, rng.choice(answers)


def turn(user: str, assistant: str) -> list[Message]:
    """One exchange as two messages."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def draw_pretraining_chat(rng: random.Random, *, share_right: float) -> list[Message]:
    """A chat of one to three exchanges, whose sums are right with probability `share_right`."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for _ in range(rng.choices((1, 2, 3), weights=(80, 15, 5))[0]):
        kind = rng.random()
        if kind < 0.78:
            if kind < 0.70:
                problem = draw_problem(rng, held_out=False)
                asked = question(problem, rng)
            else:
                problem, asked = draw_story(rng)
            number = (
                problem.answer if rng.random() < share_right else near_miss(problem.answer, rng)
            )
            messages += turn(asked, reply(problem, number, rng.choice(ANSWER_STYLES)))
        elif kind < 0.86:
            messages += turn(*draw_fact(rng))
        elif kind < 0.93:
            messages += turn(*draw_talk(rng))
        else:
            messages += turn(*draw_word_game(rng))
    return messages
