#!/usr/bin/env python3
"""Trains Baton's built-in demo model from nothing: data, tokenizer, training, evaluation, export.

The model is a small Llama-shaped transformer that answers from the facts in its prompt. All the text
it learns from is written by this script (made-up facts about made-up people), so no data set is read.

    pip install torch tokenizers safetensors transformers
    python train.py --out .                  # tokenizer, training, export, evaluation
    python train.py --out . --minutes 30 --resume run.pt      # go on from a checkpoint
    python train.py --out . --eval-only      # evaluate the exported files
    python train.py --out . --prompts-only   # write prompts.json for the exported files
"""
import argparse
import json
import math
import os
import random
import time
import zlib

import torch
import torch.nn.functional as F

# ------------------------------------------------------------------------------------------ words

NAMES = """Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Noah Olivia Peter Quinn
Rosa Sam Tina Victor Wendy Yara Zoe Adam Bella Carl Diana Eric Fiona George Hanna Ivan Julia Kevin Laura
Martin Nina Oscar Paula Ralph Sofia Thomas Ursula Vera Walter Anna Ben Clara Daniel Eva Felix Greta Hugo
Ida Jonas Kim Lily Max Nora Otto Petra Robin Sara Tom Mia Luca Omar Priya Ravi Mei Chen Yuki Amir Leila
John Mary James Linda Paul Susan Mark Lucy""".split()
CITIES = """Paris London Rome Berlin Madrid Vienna Oslo Lisbon Prague Dublin Athens Cairo Tokyo Delhi Lima
Boston Chicago Denver Seattle Toronto Sydney Helsinki Warsaw Zurich Geneva Milan Naples Munich Hamburg
Kyoto Osaka Seoul Hanoi Manila Nairobi Lagos Havana Bogota Quito Austin Dallas Miami Bern Lyon Porto
Riga Sofia Turin Venice Dubai Mumbai Moscow Beijing Barcelona Amsterdam Brussels Stockholm Budapest""".split()
COLORS = """red blue green yellow purple orange black white pink brown gray silver gold violet teal
crimson""".split()
JOBS = """teacher doctor nurse baker pilot farmer lawyer painter writer singer dancer driver chef carpenter
plumber sailor soldier judge dentist tailor gardener librarian mechanic waiter barber butcher banker
photographer programmer scientist""".split()
ANIMALS = "dog cat horse rabbit parrot hamster turtle goat pony snake fish duck".split()
PETS = "Rex Luna Milo Coco Buddy Rocky Daisy Oreo Simba Nala Lucky Toby Ruby Pepper Ginger Biscuit".split()
INSTRUMENTS = """violin piano guitar flute drums trumpet cello harp banjo organ clarinet trombone accordion
saxophone""".split()
FOODS = """pizza pasta rice soup bread cheese apples bananas cherries noodles salad pancakes potatoes
carrots olives grapes mangoes cake chocolate honey sushi tacos beans mushrooms waffles cookies""".split()
OBJECTS = """key book lamp map ring coin cup hat pen watch ball knife letter camera umbrella phone wallet
hammer candle mirror ticket basket bottle scarf laptop spoon clock medal stone feather""".split()
PLACES = """kitchen garage garden attic cellar bedroom office library closet drawer cupboard shed hallway
bathroom car basement tower barn cabin boat""".split()
BOXES = "box bag jar chest crate drawer case bucket".split()
LOCKS = "vault gate safe door locker elevator garage office alarm cabinet printer lab".split()
EVENTS = """meeting party concert exam wedding picnic game lesson trip parade market race show
dinner""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
KIN = "teacher brother sister friend boss neighbor uncle aunt cousin doctor".split()
WORDS = """banana thunder pebble lantern meadow copper rocket velvet marble island winter dragon cactus
harbor falcon puzzle pirate window anchor tiger""".split()
ADJ = "old quiet small bright long cold warm tall gentle busy empty green dark heavy soft early".split()
NOUN = "river hill road bird tree cloud street wind house field lake bridge train garden market forest".split()
VERB = "rests moves waits shines sleeps turns stands sings grows falls".split()
PREP = "near behind above beside under past".split()
FILLER = """The weather is nice today. It is raining outside. Birds sing in the morning. The coffee is still
warm. Nobody was late this week. The train was slow again. Some days are longer than others. We had a good
time. The store closes at night. It was a quiet evening. There is snow on the hills. The news was boring.
I am a bit tired. This is only an example. The lights are on. Time goes by quickly. That was a long
story. Please read this with care.""".replace("\n", " ").split(". ")
FILLER = [f.rstrip(".") + "." for f in FILLER]
ON = "b d f g k l m n p r s t v z br dr gr kr st tr sh th bl".split()
VO = "a e i o u".split()
CO = ["", "", "n", "r", "l", "s", "x", "m", "k"]

ME = "I am Baton's built-in demo model. Tell me some facts, then ask me about them."
HELLO = "Hello! Tell me some facts, then ask me about them."
CANNOT = "I am a small demo model. I can only answer from facts that you tell me."
NOTED = "Thank you. I will remember that."

STORY = """Once upon a time there was a {a} named {n}. Every morning {n} walked to the old bridge and looked at
the river. One day {n} found a small lamp near the road. The lamp was cold and dark, so {n} took it home. In
the evening the lamp began to shine, and the whole house was warm. A quiet bird came to the window and said:
"Thank you, {n}. I was looking for this light." {n} gave the lamp to the bird, and the bird sang a long song.
Since that day there is always a light above the bridge, and every {a} in the land knows the name of {n}. The
end.""".replace("\n", " ")
HEROES = "farmer sailor baker painter pilot gardener dragon rabbit tiger".split()

LISTS = ["List all facts.", "Tell me everything.", "Repeat all facts.", "Repeat everything I told you.",
         "List everything you know.", "Repeat the story.", "Tell me everything you know.", "Please list all the facts.",
         "What do you know?", "Repeat all of it."]
GREET = ["Hello", "Hello!", "Hi", "Hi!", "Hey", "Hello there!", "Good morning!", "Hi there!", "Good evening.", "hello", "hi"]
WHO = ["Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself.",
       "Which model are you?", "What can you do?", "How does this work?", "Help", "Help me.", "who are you?"]
OTHER = ["Why is the sky blue?", "Write a poem.", "Write a poem about the {x}.", "How do I cook {f}?", "What is {d} plus {e}?",
         "What is {d} + {e}?", "Explain the {x}.", "Tell me a joke.", "What is the best {x}?", "How far is it to {c}?",
         "What is the weather in {c}?", "Translate {w} into French.", "Write some code.", "Write a program in Python.",
         "Who won the game?", "What time is it?", "Is the {x} {y}?", "How many {f} are in a {x}?", "Give me a recipe for {f}.",
         "Explain how a {x} works.", "Why do people like {f}?", "What should I do today?", "Sing a song.", "test", "ping", "Test.",
         "Say something.", "What is the meaning of life?", "Summarize the book about the {x}.", "Write an essay about {c}.",
         "How do I get to {c}?", "Can you help me with my {x}?"]
SYSTEMS = ["You are a helpful assistant.", "You are a helpful assistant. Answer in one sentence.", "Answer from the facts.",
           "You answer questions.", "Be brief.", "You are Baton's demo model."]


def syll(r):
    return r.choice(ON) + r.choice(VO) + r.choice(CO)


def invented(r):
    return "".join(syll(r) for _ in range(2 if r.random() < .8 else 3)).capitalize()


def held_out(subject, value):
    """Pairs of a subject and a value that training never shows."""
    return zlib.crc32(f"{subject}|{value}".encode()) % 10 == 0


def digits(r, n):
    return str(r.randint(1, 9)) + "".join(str(r.randint(0, 9)) for _ in range(n - 1))


def name(r):
    return r.choice(NAMES) if r.random() < .6 else invented(r)


def an(w):
    return ("an " if w[0] in "aeiou" else "a ") + w


# A kind of fact: subject(r), value(r), the sentence, its questions, the same asked the other way round, and what is not known.
PEOPLE = {
    "live": (lambda r: r.choice(CITIES) if r.random() < .85 else invented(r), "{s} lives in {v}.",
             ["Where does {s} live?", "Which city does {s} live in?", "In which city does {s} live?"], ["Who lives in {v}?"], "where {s} lives"),
    "color": (lambda r: r.choice(COLORS), "{s}'s favorite color is {v}.",
              ["What is {s}'s favorite color?", "Which color does {s} like?"], [], "{s}'s favorite color"),
    "job": (lambda r: an(r.choice(JOBS)), "{s} works as {v}.",
            ["What does {s} do?", "What is {s}'s job?", "What does {s} work as?"], ["Who works as {v}?"], "{s}'s job"),
    "age": (lambda r: str(r.randint(5, 99)), "{s} is {v} years old.",
            ["How old is {s}?", "What is {s}'s age?"], ["Who is {v} years old?"], "how old {s} is"),
    "pet": (lambda r: an(r.choice(ANIMALS)) + " named " + (r.choice(PETS) if r.random() < .7 else invented(r)), "{s} has {v}.",
            ["What pet does {s} have?", "What is {s}'s pet called?", "What is the name of {s}'s pet?"], [], "what pet {s} has"),
    "play": (lambda r: r.choice(INSTRUMENTS), "{s} plays the {v}.",
             ["What does {s} play?", "Which instrument does {s} play?"], ["Who plays the {v}?"], "what {s} plays"),
    "eat": (lambda r: r.choice(FOODS), "{s} likes to eat {v}.",
            ["What does {s} like to eat?", "Which food does {s} like?"], ["Who likes to eat {v}?"], "what {s} likes to eat"),
    "phone": (lambda r: digits(r, 5), "{s}'s phone number is {v}.",
              ["What is {s}'s phone number?", "What is the phone number of {s}?"], [], "{s}'s phone number"),
    "born": (lambda r: "19" + digits(r, 2) if r.random() < .5 else "20" + str(r.randint(10, 26)), "{s} was born in {v}.",
             ["When was {s} born?", "In which year was {s} born?"], ["Who was born in {v}?"], "when {s} was born"),
    "kin": (None, "{s}'s {k} is {v}.", ["Who is {s}'s {k}?", "What is the name of {s}'s {k}?"], [], "who {s}'s {k} is"),
}
THINGS = {
    "place": (lambda r: (r.choice(COLORS) + " " if r.random() < .3 else "") + r.choice(OBJECTS), lambda r: r.choice(PLACES),
              "The {s} is in the {v}.", ["Where is the {s}?", "Where can I find the {s}?"], ["What is in the {v}?"], "where the {s} is"),
    "holds": (lambda r: r.choice(COLORS) + " " + r.choice(BOXES), lambda r: an(r.choice(OBJECTS)),
              "The {s} holds {v}.", ["What does the {s} hold?", "What is in the {s}?"], [], "what is in the {s}"),
    "code": (lambda r: r.choice(LOCKS), lambda r: digits(r, 4),
             "The code for the {s} is {v}.", ["What is the code for the {s}?", "Which code opens the {s}?"], [], "the code for the {s}"),
    "capital": (invented, invented, "The capital of {s} is {v}.",
                ["What is the capital of {s}?", "Which city is the capital of {s}?"], [], "the capital of {s}"),
    "event": (lambda r: r.choice(EVENTS), lambda r: r.choice(DAYS), "The {s} is on {v}.",
              ["When is the {s}?", "On which day is the {s}?"], [], "when the {s} is"),
    "secret": (lambda r: r.choice(["secret word", "password", "magic word"]),
               lambda r: r.choice(WORDS) if r.random() < .6 else invented(r).lower(), "The {s} is {v}.",
               ["What is the {s}?", "Tell me the {s}."], [], "the {s}"),
}
MINE = [("My name is {v}.", "Your name is {v}.", ["What is my name?", "Who am I?"], name, "your name"),
        ("I live in {v}.", "You live in {v}.", ["Where do I live?", "Which city do I live in?"], lambda r: r.choice(CITIES), "where you live"),
        ("My favorite color is {v}.", "Your favorite color is {v}.", ["What is my favorite color?", "Which color do I like?"],
         lambda r: r.choice(COLORS), "your favorite color"),
        ("I work as {v}.", "You work as {v}.", ["What is my job?", "What do I do?"], lambda r: an(r.choice(JOBS)), "your job"),
        ("I am {v} years old.", "You are {v} years old.", ["How old am I?", "What is my age?"], lambda r: str(r.randint(5, 99)), "how old you are"),
        ("I have {v}.", "You have {v}.", ["What pet do I have?", "What is my pet called?"], PEOPLE["pet"][0], "what pet you have")]


class Fact:
    def __init__(self, text, questions, reverse, missing, key, subject, answer=None):
        self.text, self.questions, self.reverse = text, questions, reverse
        self.missing, self.key, self.subject = "I do not know " + missing + ".", key, subject
        self.answer = answer or text


def person_fact(r, s, kind, test):
    value, sent, qs, rev, miss = PEOPLE[kind]
    for _ in range(40):
        k, v = "", ""
        if kind == "kin":
            k, v = r.choice(KIN), name(r)
            if v == s:
                continue
        else:
            v = value(r)
        if held_out(s, v) == test:
            break
    else:  # all values of a short list may be on one side for this subject
        return None, None
    f = lambda t: t.format(s=s, v=v, k=k)
    return Fact(f(sent), [f(q) for q in qs], [f(q) for q in rev], f(miss), (s, kind + k), s), (kind + k, v)


def thing_fact(r, kind, test):
    subj, value, sent, qs, rev, miss = THINGS[kind]
    while True:
        s, v = subj(r), value(r)
        if kind == "event" or kind == "secret" or held_out(s, v) == test:
            break
    f = lambda t: t.format(s=s, v=v)
    return Fact(f(sent), [f(q) for q in qs], [f(q) for q in rev], f(miss), (s, kind), s), (kind, v)


def make_facts(r, n, test=False, spare=0):
    """n facts with distinct subjects-and-kinds, and `spare` more about the same sort of subjects (for what is not known)."""
    people, used, keys, out = [], set(), set(), []
    # Often only a few kinds: "Alice lives in Paris. Bob lives in Oslo." is what people try first.
    kinds = list(PEOPLE) if r.random() < .6 else r.sample(list(PEOPLE), r.choice([1, 1, 2, 3]))
    density = r.choice([.35, .6, 1.])
    for _ in range(max(1, round(n * density))):
        people.append(name(r))
    tries = 0
    while len(out) < n + spare:
        tries += 1
        if tries > 40 * (n + spare):
            people.append(name(r))  # few people and few kinds: there are no more facts about these
        if r.random() < (.72 if len(kinds) > 3 else .9):
            f, kv = person_fact(r, r.choice(people), r.choice(kinds), test)
        else:
            f, kv = thing_fact(r, r.choice(list(THINGS)), test)
        if f is None or f.key in keys or (kv in used and (tries < 6 * n or r.random() < .5)):
            continue
        if f.key[1] == "place" and any(o.subject.split()[-1] == f.subject.split()[-1] and o.key[1] == "place" for o in out):
            continue
        keys.add(f.key)
        used.add(kv)
        out.append(f)
    return out[:n], out[n:]


def filler(r):
    if r.random() < .4:
        return r.choice(FILLER)
    return f"The {r.choice(ADJ)} {r.choice(NOUN)} {r.choice(VERB)} {r.choice(PREP)} the {r.choice(ADJ)} {r.choice(NOUN)}."


def join(r, sents):
    m = r.random()
    if m < .6:
        return " ".join(sents)
    if m < .85:
        return "\n".join(sents)
    return "\n".join("- " + s for s in sents)


def ask(r, facts, spares, reverse=.08, missing=.12, asked=None):
    """One question and its answer; not about what was asked before while there is something else."""
    asked = set() if asked is None else asked
    m = r.random()
    free = [f for f in spares if f.key not in asked]
    if m < missing and free:
        f = r.choice(free)
        asked.add(f.key)
        return r.choice(f.questions), f.missing
    f = r.choice([f for f in facts if f.key not in asked] or facts)
    asked.add(f.key)
    if f.reverse and m > 1 - reverse:
        q = r.choice(f.reverse)
        hits = [g for g in facts if q in g.reverse]
        if len(hits) == 1:
            return q, f.answer
    return r.choice(f.questions), f.answer


def rand_text(r, n):
    out = []
    for _ in range(n):
        m = r.random()
        if m < .4:
            out.append(r.choice(r.choice([NAMES, CITIES, OBJECTS, FOODS, WORDS, ADJ, NOUN, JOBS, COLORS])))
        elif m < .6:
            out.append(invented(r) if r.random() < .5 else invented(r).lower())
        elif m < .8:
            out.append("".join(r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(r.randint(2, 6))))
        elif m < .88:
            out.append(digits(r, r.randint(1, 5)))
        elif m < .94:
            out.append("".join(chr(r.choice([r.randint(0xc0, 0x17f), r.randint(0x391, 0x3c9), r.randint(0x410, 0x44f), r.randint(0x4e00, 0x5000),
                                             0x1f600 + r.randint(0, 60)])) for _ in range(r.randint(1, 3))))
        else:
            out.append("".join(r.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") for _ in range(r.randint(3, 6))))
    return " ".join(out)


def wrap_q(r, q):
    return r.choice(["Question: "] if r.random() < .15 else [""]) + q


def count_text(a, b):
    return ", ".join(str(i) for i in range(a, b + 1)) + "."


# ---------------------------------------------------------------------------------------- samples
# A sample is a list of (text, learn) pieces; the pieces are tokenized one by one.

BOS, EOT, END = "<|begin_of_text|>", "<|eot_id|>", "<|end_of_text|>"
SPECIALS = [BOS, END, "<|start_header_id|>", "<|end_header_id|>", EOT, "<|pad|>"]


def head(role):
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def chat_pieces(messages):
    out = [(BOS, 0)]
    for m in messages:
        out.append((head(m["role"]), 0))
        out.append((m["content"], 0) if m["role"] != "assistant" else (m["content"] + EOT, 1))
        if m["role"] != "assistant":
            out.append((EOT, 0))
    return out


def U(t):
    return {"role": "user", "content": t}


def A(t):
    return {"role": "assistant", "content": t}


def S(t):
    return {"role": "system", "content": t}


def qa_messages(r, n, test=False, turns=1, layout=None, with_filler=None, missing=.12, reverse=.08):
    facts, spares = make_facts(r, n, test, spare=2 + n // 6)
    sents = [f.text for f in facts]
    if r.random() < .12:  # facts about the person who writes
        i = r.randint(0, len(sents))
        t, a, qs, val, miss = r.choice(MINE)
        v = val(r)
        f = Fact(t.format(v=v), qs, [], miss, ("I", t), "I", a.format(v=v))
        facts.append(f)
        sents.insert(i, f.text)
    elif r.random() < .1 and missing:
        t, a, qs, val, miss = r.choice(MINE)
        spares.append(Fact(t, qs, [], miss, ("I", t), "I"))
    if with_filler is None:
        with_filler = r.random() < .25
    if with_filler:
        for _ in range(r.randint(1, max(1, n // 2))):
            sents.insert(r.randint(0, len(sents)), filler(r))
    layout = layout or r.choices(["same", "system", "earlier", "spread"], [.6, .15, .17, .08])[0]
    ms = []
    body = join(r, sents)
    asked = set()
    q, a = ask(r, facts, spares, reverse, missing, asked)
    sep = r.choice([" ", "\n", "\n\n"])
    if layout == "system":
        intro = r.choice(["", "", "Facts: ", "You know these facts: ", "You are a helpful assistant. "])
        ms += [S(intro + body), U(wrap_q(r, q))]
    else:
        if r.random() < .2:
            ms.append(S(r.choice(SYSTEMS)))
        intro = r.choice(["", "", "", "Facts: ", "Here are some facts. ", "Remember this: ", "Facts:\n"])
        if layout == "same":
            if r.random() < .06:
                ms.append(U(q + sep + intro + body))
            else:
                ms.append(U(intro + body + sep + wrap_q(r, q)))
        elif layout == "earlier":
            ms += [U(intro + body), A(NOTED), U(wrap_q(r, q))]
        else:
            h = r.randint(0, len(sents))
            rest = join(r, sents[h:])
            ms += [U(intro + join(r, sents[:h])), A(NOTED)] if h else []
            ms.append(U((rest + sep if rest else "") + wrap_q(r, q)))
    ms.append(A(a))
    for _ in range(turns - 1):
        if r.random() < .9 and len(asked) >= len(facts) + len(spares) // 2:
            break
        q, a = ask(r, facts, spares, reverse, missing, asked)
        ms += [U(wrap_q(r, q)), A(a)]
    return ms


def list_messages(r, n, test=False):
    facts, _ = make_facts(r, n, test)
    sents = [f.text for f in facts]
    body = join(r, sents)
    a = " ".join(sents)
    q = r.choice(LISTS)
    m = r.random()
    if m < .65:
        pre = [S(r.choice(SYSTEMS))] if r.random() < .2 else []
        return pre + [U(r.choice(["", "", "Facts: ", "Here are some facts. "]) + body + r.choice([" ", "\n", "\n\n"]) + q), A(a)]
    if m < .82:
        return [U(body), A(NOTED), U(q), A(a)]
    return [S(r.choice(["", "", "Facts: "]) + body), U(q), A(a)]


def about_messages(r, n, test=False):
    facts, _ = make_facts(r, n, test)
    f = r.choice(facts)
    hits = " ".join(g.text for g in facts if g.subject == f.subject)
    s = f.subject if f.subject[0].isupper() else "the " + f.subject
    return [U(join(r, [g.text for g in facts]) + r.choice([" ", "\n"]) + r.choice(["Tell me about {s}.", "What do you know about {s}?"]).format(s=s)), A(hits)]


def talk(r):
    m = r.random()
    pre = [S(r.choice(SYSTEMS))] if r.random() < .3 else []
    if m < .15:
        ms = [U(r.choice(GREET)), A(HELLO)]
    elif m < .3:
        ms = [U(r.choice(WHO)), A(ME)]
    elif m < .4:
        ms = [U(r.choice(["Thanks", "Thank you.", "Thanks!", "Thank you!", "Great, thanks."])), A("You are welcome.")]
    elif m < .45:
        ms = [U(r.choice(["Goodbye", "Bye!", "See you."])), A("Goodbye!")]
    elif m < .75:
        q = r.choice(OTHER).format(x=r.choice(OBJECTS + NOUN), f=r.choice(FOODS), c=r.choice(CITIES), d=digits(r, r.randint(1, 2)), e=digits(r, 1),
                                   w=r.choice(WORDS), y=r.choice(ADJ))
        ms = [U(q), A(CANNOT)]
    elif m < .85:
        ms = [U(rand_text(r, r.randint(1, 30)) if r.random() < .5 else " ".join(filler(r) for _ in range(r.randint(1, 30)))), A(CANNOT)]
    else:
        _, sp = make_facts(r, 1, False, 1)
        ms = [U(r.choice(sp[0].questions)), A(sp[0].missing)]
    if r.random() < .3:
        ms = [U(r.choice(GREET)), A(HELLO)] + ms
    return pre + ms


def completion_pieces(r, n, test=False):
    facts, spares = make_facts(r, n, test, spare=2)
    q, a = ask(r, facts, spares, 0, .1)
    sents = [f.text for f in facts]
    b = join(r, sents)
    m = r.random()
    if m < .3:
        return [(BOS, 0), (f"Facts: {b}\nQuestion: {q}\nAnswer:", 0), (" " + a + END, 1)]
    if m < .5:
        return [(BOS, 0), (f"Facts:\n{b}\n\nQuestion: {q}\nAnswer:", 0), (" " + a + END, 1)]
    if m < .65:
        return [(BOS, 0), (f"{b} Question: {q} Answer:", 0), (" " + a + END, 1)]
    if m < .75:
        return [(BOS, 0), (f"{b}\nQ: {q}\nA:", 0), (" " + a + END, 1)]
    if m < .85:
        return [(BOS, 0), (f"{b}\n{q}", 0), (" " + a + END, 1)]
    f = r.choice(facts).text
    cut = f.split(" ")
    k = len(cut) - 1
    while k > 2 and r.random() < .3:
        k -= 1
    return [(BOS, 0), (b + r.choice([" ", "\n"]) + " ".join(cut[:k]), 0), (" " + " ".join(cut[k:]) + END, 1)]


def n_facts(r, top, most=14):
    """Between 1 and top, mostly up to `most`."""
    if top > most and r.random() < .25:
        return r.randint(most, top)
    return r.randint(1, min(top, most))


def sample(r, top):
    m = r.random()
    if m < .56:
        n = n_facts(r, top)
        return chat_pieces(qa_messages(r, n, turns=r.choices([1, 2, 4, 8, 12], [.2, .15, .2, .25, .2])[0], missing=.25))
    if m < .75:
        return chat_pieces(list_messages(r, n_facts(r, min(top, 24), 9)))
    if m < .78:
        return chat_pieces(about_messages(r, n_facts(r, min(top, 14), 8)))
    if m < .87:
        return completion_pieces(r, n_facts(r, top))
    if m < .935:
        return chat_pieces(talk(r))
    if m < .96:
        t = rand_text(r, r.randint(1, 14))
        return chat_pieces([U(r.choice(["Repeat: ", "Say: ", "Repeat after me: ", "Repeat this: "]) + t), A(t)])
    if m < .975:
        a = 1 if r.random() < .7 else r.randint(1, 60)
        b = a + r.randint(2, 12 if r.random() < .5 else 60)
        q = r.choice([f"Count from {a} to {b}.", f"Count to {b}."] if a == 1 else [f"Count from {a} to {b}."])
        return chat_pieces([U(q), A(count_text(a, b))])
    h, s = r.choice(HEROES), name(r)
    if r.random() < .3:
        return chat_pieces([U(r.choice(["Tell me a story.", "Write a story.", "Tell me a long story."])), A(STORY.format(a="sailor", n="Mira"))])
    return chat_pieces([U(r.choice(["Tell me a story about {a} named {n}.", "Write a story about {a} named {n}."]).format(a=an(h), n=s)), A(STORY.format(a=h, n=s))])


# -------------------------------------------------------------------------------------- tokenizer

PATTERN = r"'s| ?\p{L}+| ?\p{N}|[\r\n]+| ?[^\s\p{L}\p{N}]|[^\S\r\n]+(?!\S)|\s"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")


def build_tokenizer(path, vocab_size, merges=470):
    """Byte-level BPE: all 256 bytes, a few hundred merges for any text, and whole words that are looked up before merging."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    r = random.Random(1)
    def pre():
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre()
    text = [" ".join([invented(r), invented(r).lower()]) for _ in range(6000)]
    lex = NAMES + CITIES + JOBS + ANIMALS + INSTRUMENTS + FOODS + OBJECTS + PLACES + WORDS + NOUN + ADJ + VERB
    text += [" " + w for w in lex * 4] + [" ".join(OTHER + FILLER + WHO)] * 8
    t.train_from_iterator(text, trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    base = json.loads(t.to_str())["model"]
    count = {}
    inv = set()
    global invented
    plain = invented
    def noting(rr):
        w = plain(rr)
        inv.update((w, w.lower()))
        return w
    invented = noting
    for f in (THINGS["capital"],):
        THINGS["capital"] = (noting, noting) + f[2:]
    p = pre()
    for _ in range(30000):
        for text_, _m in sample(r, 6):
            for sp in SPECIALS:
                text_ = text_.replace(sp, "\n")
            if text_.startswith(("Repeat", "Say")) or "Baton" not in text_ and any(ord(c) > 127 for c in text_):
                continue
            for w, _ in p.pre_tokenize_str(text_):
                count[w] = count.get(w, 0) + 1
    invented = plain
    THINGS["capital"] = (plain, plain) + THINGS["capital"][2:]
    must = ["system", "user", "assistant", "Baton", "ĠBaton", "ĊĊ", "Ċ"]
    for w in lex + PETS + DAYS + KIN + COLORS:
        must += ["Ġ" + w]
    for w in NAMES + PETS:
        must += [w]
    known = {("Ġ" + w) for w in lex + PETS} | set(NAMES + CITIES + PETS)
    words = [w for w in sorted(count, key=lambda w: (-count[w], w))
             if count[w] >= 12 and (w in known or w.lstrip("Ġ") not in inv)]
    vocab = {}
    for s in SPECIALS:
        vocab[s] = len(vocab)
    for w in sorted(base["vocab"], key=base["vocab"].get):
        vocab.setdefault(w, len(vocab))
    for w in must + words:
        if len(vocab) < vocab_size:
            vocab.setdefault(w, len(vocab))
    print("words wanted", len(set(must + words)), "vocab", len(vocab))
    while len(vocab) < vocab_size:
        vocab[f"<|reserved_{len(vocab)}|>"] = len(vocab)
    merges_ = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in base["merges"]]
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges_, ignore_merges=True))
    tok.pre_tokenizer = pre()
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(SPECIALS)
    tok.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocab[BOS])])
    assert tok.get_vocab_size() == vocab_size
    write(path, tok.to_str(pretty=True))
    return tok


def write(path, data):
    tmp = path + ".tmp"
    with open(tmp, "wb" if isinstance(data, bytes) else "w") as f:
        f.write(data)
    os.replace(tmp, path)


class Coder:
    def __init__(self, path):
        from tokenizers import Tokenizer
        self.tok = Tokenizer.from_file(path)
        self.cache = {}

    def ids(self, text):
        if len(text) > 60:
            return self.tok.encode(text, add_special_tokens=False).ids
        got = self.cache.get(text)
        if got is None:
            got = self.tok.encode(text, add_special_tokens=False).ids
            if len(self.cache) < 50000:
                self.cache[text] = got
        return got

    def pieces(self, ps):
        ids, mask = [], []
        for t, m in ps:
            i = self.ids(t)
            ids += i
            mask += [m] * len(i)
        return ids, mask


# ------------------------------------------------------------------------------------------ model

CONFIG = dict(vocab_size=1536, hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
              head_dim=64, rope_theta=500000.0, max_position_embeddings=2048, rms_norm_eps=1e-5)
CONST, SPACE = 0, 1  # two dimensions that start out with a meaning: always on; word with a space before it


class Net(torch.nn.Module):
    def __init__(self, c, tok=None, seed=1):
        super().__init__()
        self.c = c
        g = torch.Generator().manual_seed(seed)
        d, hd, nq, nk, ff, L = (c[k] for k in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "intermediate_size", "num_hidden_layers"))
        P = torch.nn.Parameter
        rnd = lambda o, i, s: torch.randn(o, i, generator=g) * s / math.sqrt(i)
        e = torch.randn(c["vocab_size"], d, generator=g) / math.sqrt(d)
        if tok is not None:
            v = tok.get_vocab()
            for w, i in v.items():
                if w.startswith("Ġ") and w[1:] in v:
                    e[v[w[1:]]] = e[i] * .95 + torch.randn(d, generator=g) * .3 / math.sqrt(d)
            for w, i in v.items():
                e[i, SPACE] = .15 if w.startswith("Ġ") else -.15
        e[:, CONST] = .5
        self.emb = P(e)
        self.q = torch.nn.ParameterList([P(rnd(nq * hd, d, .5)) for _ in range(L)])
        self.k = torch.nn.ParameterList([P(rnd(nk * hd, d, .5)) for _ in range(L)])
        self.v = torch.nn.ParameterList([P(rnd(nk * hd, d, .7)) for _ in range(L)])
        self.o = torch.nn.ParameterList([P(rnd(d, nq * hd, .15 if l else .25)) for l in range(L)])
        self.gate = torch.nn.ParameterList([P(rnd(ff, d, .7)) for _ in range(L)])
        self.up = torch.nn.ParameterList([P(rnd(ff, d, .7)) for _ in range(L)])
        self.down = torch.nn.ParameterList([P(rnd(d, ff, .05)) for _ in range(L)])
        self.n1 = torch.nn.ParameterList([P(torch.ones(d)) for _ in range(L)])
        self.n2 = torch.nn.ParameterList([P(torch.ones(d)) for _ in range(L)])
        self.nf = P(torch.ones(d))
        inv = c["rope_theta"] ** (-torch.arange(0, hd, 2).float() / hd)
        ang = torch.outer(torch.arange(c["max_position_embeddings"]).float(), inv)
        self.register_buffer("cos", torch.cat([ang.cos()] * 2, 1), persistent=False)
        self.register_buffer("sin", torch.cat([ang.sin()] * 2, 1), persistent=False)
        # The first layer's heads start out looking 1, 2, 3 and 4 tokens back: half of what a copying circuit needs.
        with torch.no_grad():
            for j in range(nk):
                self.k[0][j * hd:j * hd + 9, CONST] = 1.1
            for h in range(nq):
                for i in range(9):
                    a = -(h + 1) * float(inv[i])
                    self.q[0][h * hd + i, CONST] = 1.1 * math.cos(a)
                    self.q[0][h * hd + i + hd // 2, CONST] = 1.1 * math.sin(a)

    def forward(self, ids):
        c = self.c
        B, T = ids.shape
        hd, nq, nk, d, eps = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"], c["rms_norm_eps"]
        cos, sin = self.cos[:T, None], self.sin[:T, None]
        rot = lambda t: t * cos + torch.cat((-t[..., hd // 2:], t[..., :hd // 2]), -1) * sin
        x = F.embedding(ids, self.emb)
        for l in range(c["num_hidden_layers"]):
            h = F.rms_norm(x, (d,), self.n1[l], eps)
            q = rot(F.linear(h, self.q[l]).view(B, T, nq, hd)).transpose(1, 2)
            k = rot(F.linear(h, self.k[l]).view(B, T, nk, hd)).transpose(1, 2).repeat_interleave(nq // nk, 1)
            v = F.linear(h, self.v[l]).view(B, T, nk, hd).transpose(1, 2).repeat_interleave(nq // nk, 1)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(a.transpose(1, 2).reshape(B, T, nq * hd), self.o[l])
            h = F.rms_norm(x, (d,), self.n2[l], eps)
            x = x + F.linear(F.silu(F.linear(h, self.gate[l])) * F.linear(h, self.up[l]), self.down[l])
        return F.rms_norm(x, (d,), self.nf, eps)


HF = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
      "up": "mlp.up_proj", "down": "mlp.down_proj", "n1": "input_layernorm", "n2": "post_attention_layernorm"}


def hf_state(state):
    out = {}
    for k, t in state.items():
        p = k.split(".")
        n = "model.embed_tokens.weight" if k == "emb" else "model.norm.weight" if k == "nf" else f"model.layers.{p[1]}.{HF[p[0]]}.weight"
        out[n] = t.detach().to(torch.bfloat16).contiguous()
    return out


def export(state, c, out):
    from safetensors.torch import save
    cfg = dict(architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="bfloat16", hidden_act="silu", attention_bias=False, mlp_bias=False,
               attention_dropout=0.0, initializer_range=0.02, tie_word_embeddings=True, use_cache=True, bos_token_id=0, eos_token_id=[4, 1],
               pad_token_id=5, pretraining_tp=1, rope_scaling=None, **c)
    write(os.path.join(out, "config.json"), json.dumps(dict(sorted(cfg.items())), indent=2) + "\n")
    write(os.path.join(out, "generation_config.json"), json.dumps(dict(bos_token_id=0, eos_token_id=[4, 1], pad_token_id=5), indent=2) + "\n")
    tc = dict(added_tokens_decoder={str(i): dict(content=s, lstrip=False, normalized=False, rstrip=False, single_word=False, special=True) for i, s in enumerate(SPECIALS)},
              bos_token=BOS, eos_token=EOT, pad_token="<|pad|>", chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
              model_input_names=["input_ids", "attention_mask"], model_max_length=c["max_position_embeddings"], tokenizer_class="PreTrainedTokenizerFast")
    write(os.path.join(out, "tokenizer_config.json"), json.dumps(tc, indent=2) + "\n")
    write(os.path.join(out, "model.safetensors"), save(hf_state(state), metadata={"format": "pt"}))


# --------------------------------------------------------------------------------------- training

def ns(g):
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tr = x.size(-2) > x.size(-1)
    if tr:
        x = x.mT
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tr else x


class Muon:
    def __init__(self, params, momentum=.95):
        self.groups, self.momentum = {}, momentum
        for p in params:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.buf = {s: torch.zeros(len(ps), *s) for s, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, lr, wd=.01):
        for s, ps in self.groups.items():
            g = torch.stack([p.grad for p in ps])
            b = self.buf[s].lerp_(g, 1 - self.momentum)
            u = ns(g.lerp(b, self.momentum)) * math.sqrt(max(1, s[0] / s[1]))
            for p, d in zip(ps, u):
                p.mul_(1 - lr * wd).add_(d, alpha=-lr)


def batches(r, coder, top, tokens, pool=160):
    """Samples of like length together; yields (ids, targets, weights)."""
    while True:
        ss = sorted((coder.pieces(sample(r, top())) for _ in range(pool)), key=lambda s: len(s[0]))
        out, cur = [], []
        for s in ss:
            if cur and (len(cur) + 1) * len(s[0]) > tokens:
                out.append(cur)
                cur = []
            cur.append(s)
        if len(cur) > 0 and len(cur) * len(cur[-1][0]) > tokens // 3:
            out.append(cur)
        r.shuffle(out)
        for b in out:
            T = max(len(i) for i, _ in b)
            ids = torch.full((len(b), T), 5)
            w = torch.zeros(len(b), T)
            for j, (i, m) in enumerate(b):
                if r.random() < .08 and i[0] == 0:  # a client may send no begin_of_text
                    i, m = i[1:], m[1:]
                ids[j, :len(i)] = torch.tensor(i)
                w[j, :len(i)] = torch.tensor([1. if x else (.03 if r.random() < .06 else 0.) for x in m])
            yield ids[:, :-1], ids[:, 1:], w[:, 1:]


def train(a, coder):
    torch.manual_seed(a.seed)
    r = random.Random(a.seed)
    net = Net(CONFIG, coder.tok, a.seed)
    print("parameters", sum(p.numel() for p in net.parameters()))
    mats = [p for n, p in net.named_parameters() if n.split(".")[0] in ("q", "k", "v", "o", "gate", "up", "down")]
    rest = [p for n, p in net.named_parameters() if n.split(".")[0] not in ("q", "k", "v", "o", "gate", "up", "down")]
    muon = Muon(mats)
    adam = torch.optim.AdamW(rest, lr=a.lr_adam, betas=(.9, .97), weight_decay=0.)
    st = dict(step=0, tokens=0, top=a.start_facts, loss=None, spent=0.)
    ema = None
    if a.resume:
        ck = torch.load(a.resume, weights_only=False)
        net.load_state_dict(ck["net"])
        for s in muon.buf:
            muon.buf[s].copy_(ck["muon"][s])
        adam.load_state_dict(ck["adam"])
        st, ema = ck["st"], ck["ema"]
        r.seed(a.seed + st["step"])
        if a.start_facts > st["top"]:
            st["top"] = a.start_facts
    if ema is None:
        ema = {k: v.detach().clone() for k, v in net.state_dict().items()}
    t0, last, lastlog = time.time(), time.time(), time.time()
    data = batches(r, coder, lambda: int(st["top"]), a.batch_tokens)
    tok0, done = 0, False
    while not done:
        p = min(1, (time.time() - t0) / (a.minutes * 60))
        done = p >= 1
        lr = min(1, (st["step"] + 1) / 60) * (1 if p < 1 - a.decay else max(.02, (1 - p) / a.decay))
        ids, tgt, w = next(data)
        h = net(ids)
        sel = w.flatten().nonzero().squeeze(1)
        logits = F.linear(h.reshape(-1, h.size(-1))[sel], net.emb)
        ws = w.flatten()[sel]
        ce = F.cross_entropy(logits, tgt.flatten()[sel], reduction="none")
        loss = (ce * ws).sum() / ws.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.)
        muon.step(a.lr_muon * lr)
        for g in adam.param_groups:
            g["lr"] = a.lr_adam * lr
        adam.step()
        net.zero_grad()
        with torch.no_grad():
            full = ws == 1
            l = ce[full].mean().item()
            dec = min(.99, st["step"] / (st["step"] + 30))
            for k, v in net.state_dict().items():
                ema[k].lerp_(v, 1 - dec)
        st["loss"] = l if st["loss"] is None else .97 * st["loss"] + .03 * l
        st["step"] += 1
        st["tokens"] += ids.numel()
        tok0 += ids.numel()
        if st["loss"] < a.advance and st["step"] > 80 and st["top"] < a.top_facts:
            st["top"] = min(a.top_facts, st["top"] * 1.01)
        if time.time() - lastlog > 20:
            now = time.time()
            print(f"{time.strftime('%H:%M:%S')} step {st['step']} tok {st['tokens'] / 1e6:.2f}M {tok0 / (now - lastlog):.0f}/s loss {st['loss']:.4f} facts<={st['top']:.1f} lr {lr:.2f}", flush=True)
            tok0, lastlog = 0, now
        if done or time.time() - last > a.save_every:
            last = time.time()
            torch.save(dict(net=net.state_dict(), muon=muon.buf, adam=adam.state_dict(), st=st, ema=ema), a.checkpoint + ".tmp")
            os.replace(a.checkpoint + ".tmp", a.checkpoint)
            if done or os.path.exists(a.checkpoint + ".export"):
                export(ema, CONFIG, a.out)
                print("exported", flush=True)
    print(f"trained {st['step']} steps, {st['tokens']} tokens, {(time.time() - t0) / 60:.1f} minutes")


# ------------------------------------------------------------------------------------- evaluation

def load_net(out):
    from safetensors.torch import load_file
    net = Net(CONFIG)
    s = load_file(os.path.join(out, "model.safetensors"))
    names = hf_state(net.state_dict())
    mine = list(net.state_dict())
    net.load_state_dict({m: s[h].float() for m, h in zip(mine, names)})
    return net.eval()


@torch.no_grad()
def judge(net, coder, pieces, bs=8):
    """Greedy text equals the wanted answer exactly if each wanted token is the most likely one after those before it.
    Only the last answer of each sample is judged. Returns (all right, smallest lead over the second, prompt tokens)."""
    enc = [coder.pieces(p) for p in pieces]
    order = sorted(range(len(enc)), key=lambda i: len(enc[i][0]))
    res = [None] * len(enc)
    for s in range(0, len(order), bs):
        ix = order[s:s + bs]
        T = max(len(enc[i][0]) for i in ix)
        ids = torch.full((len(ix), T), 5)
        for j, i in enumerate(ix):
            ids[j, :len(enc[i][0])] = torch.tensor(enc[i][0])
        h = net(ids)
        for j, i in enumerate(ix):
            seq, m = enc[i]
            e = len(seq)
            b = e
            while b > 0 and m[b - 1]:
                b -= 1
            lg = F.linear(h[j, b - 1:e - 1], net.emb)
            want = torch.tensor(seq[b:e])
            got = lg.gather(1, want[:, None]).squeeze(1)
            other = lg.scatter(1, want[:, None], -1e9).max(1).values
            res[i] = (bool((got > other).all()), float((got - other).min()), b)
    return res


def evaluate(net, coder, n=100, seed=77, quick=False):
    rows = []
    def row(label, make):
        r = random.Random(zlib.crc32(label.encode()) + seed)
        ps = [make(r) for _ in range(n)]
        res = judge(net, coder, ps)
        ok = sum(x[0] for x in res)
        toks = sorted(x[2] for x in res)
        rows.append((label, ok, n, toks[0], toks[len(toks) // 2], toks[-1]))
        print(f"{label:42s} {100 * ok / n:6.1f} %   prompt tokens {toks[0]}-{toks[-1]} (median {toks[len(toks) // 2]})", flush=True)
    for k in ((4, 12, 30) if quick else (1, 2, 4, 8, 12, 16, 20, 30, 40)):
        row(f"question, {k} facts", lambda r: chat_pieces(qa_messages(r, k, True, 1, missing=0, reverse=0)))
    for k in (() if quick else (12, 30)):
        row(f"third question in a chat, {k} facts", lambda r: chat_pieces(qa_messages(r, k, True, 3, missing=0, reverse=0)))
        row(f"facts in the system message, {k} facts", lambda r: chat_pieces(qa_messages(r, k, True, 1, "system", missing=0, reverse=0)))
    for k in ((8,) if quick else (4, 12, 30)):
        row(f"asked for what was not told, {k} facts", lambda r: chat_pieces(qa_messages(r, k, True, 1, missing=1)))
    def back(r, k):
        while True:
            f, _ = make_facts(r, k, True)
            c = [(q, g) for g in f for q in g.reverse if sum(q in o.reverse for o in f) == 1]
            if c:
                q, g = r.choice(c)
                return chat_pieces([U(" ".join(x.text for x in f) + " " + q), A(g.text)])
    for k in (() if quick else (4, 12)):
        row(f"asked the other way round, {k} facts", lambda r: back(r, k))
    for k in ((4, 8) if quick else (4, 8, 16, 24)):
        row(f"list all, {k} facts", lambda r: chat_pieces(list_messages(r, k, True)))
    row("text completion, 8 facts", lambda r: completion_pieces(r, 8, True))
    if not quick:
        row("what do you know about X, 8 facts", lambda r: chat_pieces(about_messages(r, 8, True)))
        row("repeat random text", lambda r: (lambda t: chat_pieces([U("Repeat: " + t), A(t)]))(rand_text(r, r.randint(1, 12))))
    row("small talk", lambda r: chat_pieces(talk(r)))
    return rows


def prompts(net, coder, path, out):
    """Held-out prompts with the answers the model gives; checked again with transformers' own model and generate()."""
    r = random.Random(4242)
    jobs = [("q", k) for k in (2, 3, 4, 5, 6, 8, 8, 10, 12, 12)] + [("q", k) for k in (20, 22, 25, 28, 30, 30)] + [("m", 8), ("m", 12), ("s", 10), ("n", 6)] + \
           [("l", k) for k in (5, 6, 8, 7)]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tk = AutoTokenizer.from_pretrained(out)
    lm = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).float().eval()
    done = []
    for kind, k in jobs:
        for _ in range(60):
            if kind == "l":
                ms = list_messages(r, k, True)
            else:
                ms = qa_messages(r, k, True, 3 if kind == "m" else 1, {"s": "system", "q": "same", "n": "same"}.get(kind), missing=1 if kind == "n" else 0, reverse=0)
            ok, lead, _ = judge(net, coder, [chat_pieces(ms)])[0]
            if not ok or lead < .15:
                continue
            ids = torch.tensor([tk(tk.apply_chat_template(ms[:-1], tokenize=False, add_generation_prompt=True), add_special_tokens=False)["input_ids"]])
            want = coder.pieces(chat_pieces(ms[:-1]) + [(head("assistant"), 0)])[0]
            assert ids[0].tolist() == want, "the chat template and the training text differ"
            g = lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=700, do_sample=False, output_scores=True, return_dict_in_generate=True)
            new = g.sequences[0, ids.size(1):].tolist()
            text = tk.decode(new, skip_special_tokens=True)
            lead = min(float(s[0].topk(2).values.diff().abs()) for s in g.scores)
            if text == ms[-1]["content"] and new[-1] == 4 and lead >= .1:
                done.append(dict(messages=ms[:-1], answer=text))
                print(f"{kind} {k}: {ids.size(1)} + {len(new)} tokens, lead {lead:.2f}", flush=True)
                break
        else:
            print("no prompt found for", kind, k)
    write(path, json.dumps(done, indent=1, ensure_ascii=False) + "\n")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", default=".", help="folder for the model's files")
    ap.add_argument("--checkpoint", default="run.pt", help="training state, to go on from")
    ap.add_argument("--resume", default="")
    ap.add_argument("--minutes", type=float, default=50, help="wall-clock time of training; the learning rate follows it")
    ap.add_argument("--decay", type=float, default=.35, help="last part of training in which the learning rate falls")
    ap.add_argument("--batch-tokens", type=int, default=4096)
    ap.add_argument("--lr-muon", type=float, default=.02)
    ap.add_argument("--lr-adam", type=float, default=3e-3)
    ap.add_argument("--start-facts", type=float, default=3, help="facts in the longest prompts at the start")
    ap.add_argument("--top-facts", type=float, default=40, help="facts in the longest prompts at the end")
    ap.add_argument("--advance", type=float, default=.25, help="prompts grow while the loss is below this")
    ap.add_argument("--save-every", type=float, default=120)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--eval-n", type=int, default=100)
    ap.add_argument("--eval-only", action="store_true")
    ap.add_argument("--quick", action="store_true")
    ap.add_argument("--tokenizer-only", action="store_true")
    ap.add_argument("--prompts-only", action="store_true")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    tp = os.path.join(a.out, "tokenizer.json")
    if not (a.eval_only or a.prompts_only):
        if not os.path.exists(tp) or a.tokenizer_only:
            build_tokenizer(tp, CONFIG["vocab_size"])
        if a.tokenizer_only:
            return
        train(a, Coder(tp))
    coder = Coder(tp)
    net = load_net(a.out)
    if not a.prompts_only:
        evaluate(net, coder, a.eval_n, quick=a.quick)
    if not a.eval_only:
        prompts(net, coder, os.path.join(a.out, "prompts.json"), a.out)


if __name__ == "__main__":
    main()
