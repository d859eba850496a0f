#!/usr/bin/env python3
"""Trains the checkpoint that calls tools from nothing: data, tokenizer, training, evaluation, export.

The model is a small Llama-shaped transformer with a chat template in Qwen's form. All the text it learns from is
written by this script, so no data set is read. Network and optimizer are those of the built-in model (../demo/train.py).

    pip install torch tokenizers safetensors transformers jinja2
    python train.py --out . --minutes 25                      # tokenizer, training, export, evaluation, cases.json
    python train.py --out . --minutes 10 --resume run.pt      # go on from a checkpoint
    python train.py --out . --eval-only                       # evaluate the exported files
    python train.py --out . --cases-only                      # write cases.json for the exported files
"""
import argparse
import importlib.util
import json
import math
import os
import random
import time
import zlib

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
SPEC = importlib.util.spec_from_file_location("demo", os.path.join(HERE, "..", "demo", "train.py"))
demo = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(demo)

CONFIG = dict(vocab_size=1024, hidden_size=128, intermediate_size=224, num_hidden_layers=4, num_attention_heads=4,
              num_key_value_heads=2, head_dim=32, rope_theta=10000.0, max_position_embeddings=2048, rms_norm_eps=1e-5)
LONGEST = 384

# ------------------------------------------------------------------------------------------ words

CITIES = demo.CITIES + ["New York", "San Francisco", "Los Angeles", "Hong Kong", "Cape Town", "Buenos Aires", "Rio", "Prague"]
COUNTRIES = """France Germany Italy Spain Portugal Austria Norway Sweden Finland Denmark Poland Greece Egypt Kenya Nigeria
Japan China India Korea Vietnam Peru Chile Brazil Mexico Canada Cuba Turkey Ireland Iceland Croatia""".split()
LANGUAGES = "French German Italian Spanish Portuguese Greek Japanese Chinese Korean Polish Czech Swedish Finnish Turkish".split()
PLACE = "weather time temperature humidity traffic news forecast pollution altitude rain wind mood".split()
PERSON = "age phone email address salary birthday nickname score rank job city boss".split()
ITEM = "price color size weight owner status rating speed brand code model stock level height".split()
COUNTRY = "capital currency language population president flag area anthem".split()
VERBS = "search find open close delete play buy order book read start stop print show save load check count send sell".split()
KEYS = "temperature value result wind sky status answer text state unit condition humidity degrees count name note".split()
SAID = """sunny cloudy rainy windy cold warm hot clear 21 degrees and light heavy rain snow high low good bad open closed
ready done full empty nothing found new old busy quiet today pm am euros dollars very""".split()
PREFIX = ["get", "get", "get", "fetch", "find", "lookup", "read", "query", "current", "show", "ask", "my"]
SUFFIX = ["info", "now", "tool", "lookup", "service", "data"]
SYSTEMS = demo.SYSTEMS + ["You are a helpful agent.", "Use the tools.", "You are an agent with tools.", "Call a tool if you need one.",
                          "Answer the user with the tools you have."]
HELLO = "Hello! Ask me something that my tools can answer."
ME = "I am a small demo model that calls tools."
NO_TOOL = "I have no tool for that."
WELCOME = "You are welcome."
GREET, WHO = demo.GREET, demo.WHO
THANKS = ["Thanks", "Thank you.", "Thanks!", "Thank you!", "Great, thanks."]
MATH = {
    "sum": (["add", "sum", "plus", "add_numbers", "sum_numbers", "add_two"],
            ["Add {a} and {b}.", "What is {a} plus {b}?", "What is {a} + {b}?", "Sum {a} and {b}.", "{a} + {b}", "Please add {a} and {b}."]),
    "product": (["multiply", "product", "times", "multiply_numbers", "mul"],
                ["Multiply {a} by {b}.", "What is {a} times {b}?", "What is {a} * {b}?", "Multiply {a} and {b}.", "{a} * {b}"]),
    "difference": (["subtract", "minus", "difference", "subtract_numbers", "sub"],
                   ["What is {a} minus {b}?", "What is {a} - {b}?", "{a} - {b}"]),
    "quotient": (["divide", "quotient", "divide_numbers", "div"],
                 ["Divide {a} by {b}.", "What is {a} divided by {b}?", "What is {a} / {b}?", "{a} / {b}"]),
}


def held_out(name, value):
    """Pairs of a tool and a value that training never shows."""
    return zlib.crc32(f"{name}|{value}".encode()) % 10 == 0


def word(r):
    return demo.invented(r) if r.random() < .5 else demo.invented(r).lower()


def phrase(r):
    m = r.random()
    if m < .4:
        return " ".join(r.choice(r.choice([demo.OBJECTS, demo.FOODS, demo.WORDS, demo.NOUN, demo.ADJ])) for _ in range(r.choice([1, 1, 2, 3])))
    if m < .8:
        return " ".join(word(r) for _ in range(r.choice([1, 1, 2])))
    return r.choice(demo.NAMES + CITIES + COUNTRIES)


def number(r):
    return demo.digits(r, r.choice([1, 2, 2, 2, 3, 4]))


def identifier(r, noun):
    """The name of a tool about a noun."""
    parts = [noun]
    if r.random() < .7:
        parts.insert(0, r.choice(PREFIX))
    if r.random() < .15:
        parts.append(r.choice(SUFFIX))
    if r.random() < .1:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return "_".join(parts)


class Need:
    """One thing that is asked for, the tool for it, the call, and how the answer is told."""

    def __init__(self, topic, question, name, parameters, arguments, subject, told):
        self.topic, self.question, self.name, self.parameters, self.arguments = topic, question, name, parameters, arguments
        self.subject = subject      # "in Paris", "of Bob"; None if `told` is a whole beginning
        self.told = told            # "weather", or "The sum of 1 and 2 is"

    def call(self):
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)

    def forced(self):
        return json.dumps({"name": self.name, "parameters": self.arguments}, ensure_ascii=False, separators=(",", ":"))

    def tell(self, pairs, text):
        """The sentence for a result: pairs of an object, or a text."""
        if text is not None and text.startswith("Error"):
            return f"The call of {self.name} failed."
        if self.subject is None:
            return f"{self.told} {text if pairs is None else pairs[0][1]}."
        space = " " if self.subject else ""
        if pairs is None:
            return f"The {self.told}{space}{self.subject} is {text}."
        return f"The {pairs[0][0]}{space}{self.subject} is {pairs[0][1]}" + "".join(f", the {k} is {v}" for k, v in pairs[1:]) + "."


def about(r, attribute, preposition, value, keys):
    """A question about an attribute of something."""
    x, p = value, preposition
    forms = ["What is the {a} {p} {x}?", "What is the {a} {p} {x}?", "Tell me the {a} {p} {x}.", "Show me the {a} {p} {x}.", "What's the {a} {p} {x}?",
             "Can you tell me the {a} {p} {x}?", "Please tell me the {a} {p} {x}.", "I need the {a} {p} {x}.", "What is the {a} {p} {x} now?",
             "Give me the {a} {p} {x}."]
    if p == "in":
        forms += ["How is the {a} in {x}?", "{A} in {x}?", "What is the {a} like in {x}?", "What is the current {a} in {x}?", "How is the {a} in {x} today?",
                  "What is the {a} in {x} today?", "{a} in {x}", "Check the {a} in {x}."]
        if attribute == "time":
            forms += ["What time is it in {x}?"] * 6
    else:
        forms += ["What is {x}'s {a}?", "Tell me {x}'s {a}."] if x[-1].isalpha() else []
        if attribute == "age":
            forms += ["How old is {x}?"] * 3
        if attribute == "price":
            forms += ["How much is {x}?", "How much does {x} cost?"] * 2
    question = r.choice(forms).format(a=attribute, A=attribute.capitalize(), p=p, x=x)
    key = r.choice(keys) if r.random() < .9 else word(r).lower()
    return Need(attribute, question, identifier(r, attribute), [(key, "string")], {key: x}, f"{p} {x}", attribute)


def need(r, test, kind=None):
    kind = kind or r.choices(["place", "person", "item", "country", "math", "verb", "tool", "bare", "translate"], [28, 7, 8, 7, 18, 12, 13, 4, 5])[0]
    while True:
        if kind == "place":
            n = about(r, r.choice(PLACE) if r.random() < .92 else word(r).lower(), "in", r.choice(CITIES) if r.random() < .7 else demo.invented(r),
                      ["city", "city", "city", "location", "location", "place", "town"])
        elif kind == "person":
            n = about(r, r.choice(PERSON), "of", demo.name(r), ["name", "person", "user", "employee", "who"])
        elif kind == "item":
            n = about(r, r.choice(ITEM), "of", r.choice(demo.OBJECTS + demo.FOODS) if r.random() < .6 else phrase(r), ["item", "product", "name", "object", "thing"])
        elif kind == "country":
            n = about(r, r.choice(COUNTRY), "of", r.choice(COUNTRIES) if r.random() < .7 else demo.invented(r), ["country", "country", "name", "state"])
        elif kind == "math":
            operation = r.choices(list(MATH), [5, 4, 2, 2])[0]
            names, forms = MATH[operation]
            a, b = number(r), number(r)
            keys = r.choice([("a", "b"), ("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2")])
            kind_of = r.choice(["integer", "integer", "number"])
            n = Need(operation, r.choice(forms).format(a=a, b=b), r.choice(names), [(k, kind_of) for k in keys], dict(zip(keys, (int(a), int(b)))), None,
                     f"The {operation} of {a} and {b} is")
        elif kind == "verb":
            v, x = r.choice(VERBS), phrase(r)
            q = r.choice(["{v} {x}.", "Please {w} {x}.", "{v} {x}", "Can you {w} {x}?"])
            if v == "search":
                q = r.choice(["Search for {x}.", "Search for {x}", "Please search for {x}."])
            key = r.choice(["query", "text", "name", "item", "what", "target"])
            name = r.choice([v, v, v + "_" + r.choice(["tool", "item", "thing"]), "do_" + v, "web_" + v])
            n = Need(v, q.format(v=v.capitalize(), w=v, x=x), name, [(key, "string")], {key: x}, None, f"Result of {name}:")
        elif kind == "tool":
            name = "_".join(word(r).lower() for _ in range(r.choice([1, 2]))) if r.random() < .7 else identifier(r, r.choice(PLACE + ITEM + VERBS))
            q = r.choice(["Use {n} with {x}.", "Call {n} with {x}.", "Run {n} with {x}.", "Call {n} for {x}.", "Use {n} on {x}."])
            key = r.choice(["value", "input", "text", "name", "query", "arg", "x"]) if r.random() < .8 else word(r).lower()
            x, kind_of = (phrase(r), "string") if r.random() < .75 else (int(number(r)), "integer")
            n = Need(name, q.format(n=name, x=x), name, [(key, kind_of)], {key: x}, None, f"Result of {name}:")
        elif kind == "bare":
            a = r.choice(["time", "date", "status", "weather", "news", "balance", "temperature", "level"])
            q = r.choice(["What is the {a}?", "Tell me the {a}.", "What is the {a} now?"] + (["What time is it?"] * 3 if a == "time" else []))
            n = Need(a, q.format(a=a), identifier(r, a), [], {}, "", a)
        else:
            text, language = phrase(r), r.choice(LANGUAGES)
            keys = [("text", "string"), (r.choice(["language", "to", "target"]), "string")]
            arguments = {keys[0][0]: text, keys[1][0]: language}
            if r.random() < .3:
                keys = keys[::-1]
                arguments = {k: arguments[k] for k, _ in keys}
            q = r.choice(["Translate {t} into {l}.", "Translate {t} to {l}.", "What is {t} in {l}?", "Please translate {t} into {l}."])
            n = Need("translate", q.format(t=text, l=language), r.choice(["translate", "translate_text", "translator", "get_translation"]), keys, arguments, None,
                     f"{text} in {language} is")
        if not n.arguments or held_out(n.name, list(n.arguments.values())[0]) == test or test is None:
            return n


def needs(r, test):
    """What one message asks for: its text, and each thing in order."""
    m = r.random()
    if m < .5:
        n = need(r, test)
        return n.question, [n]
    if m < .58:  # "in Paris and in London"
        n = need(r, test, "place")
        while True:
            city = r.choice(CITIES) if r.random() < .7 else demo.invented(r)
            if city not in n.arguments.values() and (test is None or held_out(n.name, city) == test):
                break
        key, first = next(iter(n.arguments.items()))
        other = Need(n.topic, "", n.name, n.parameters, {key: city}, f"in {city}", n.told)
        return n.question.replace(f"in {first}", f"in {first} and {r.choice(['', 'in '])}{city}"), [n, other]
    count = 2 if r.random() < .85 else 3
    found = []
    while len(found) < count:
        n = need(r, test)
        if all(n.name != o.name and n.topic != o.topic for o in found):
            found.append(n)
    texts = [n.question if n.question[-1] in ".?" else n.question + "." for n in found]
    if count == 2 and r.random() < .4:
        second = texts[1]
        if second.split()[0].rstrip("'s") in ("What", "How", "Tell", "Show", "Add", "Multiply", "Divide", "Translate", "Search", "Use", "Call", "Give", "Check"):
            second = second[0].lower() + second[1:]
        return texts[0][:-1] + " and " + second, found
    return " ".join(texts), found


def result(r, n):
    """What a tool answers: its text, and the sentence about it."""
    if r.random() < .04:
        text = "Error: " + " ".join(r.choice(SAID) for _ in range(r.randint(1, 4)))
        return text, n.tell(None, text)

    def scalar():
        m = r.random()
        if m < .45:
            return number(r) if m < .33 else number(r) + "." + str(r.randint(0, 9))
        if m < .6:
            return f"{r.randint(0, 23):02}:{r.randint(0, 59):02}" if n.topic == "time" or m < .5 else word(r)
        if m < .72:
            return number(r) + " " + r.choice(["degrees", "euros", "dollars", "pm", "km", "people"])
        if m < .8:
            return number(r) + " degrees and " + r.choice(["sunny", "cloudy", "rainy", "windy", "clear", "cold"])
        return " ".join(r.choice(SAID) if r.random() < .8 else word(r) for _ in range(r.choice([1, 1, 2, 3])))

    if r.random() < (.55 if n.subject is not None else .7):
        text = scalar()
        return text, n.tell(None, text)
    keys = [n.told if n.subject is not None and r.random() < .3 else r.choice(KEYS) if r.random() < .9 else word(r).lower()]
    if n.subject is not None and r.random() < .35:
        keys.append(r.choice([k for k in KEYS if k != keys[0]]))
    pairs = [(k, scalar()) for k in keys]
    quoted = lambda v: v if v.isdigit() or v.replace(".", "", 1).isdigit() else json.dumps(v)
    colon, comma = r.choice([(": ", ", "), (": ", ", "), (":", ",")])
    return "{" + comma.join(f'"{k}"{colon}{quoted(v)}' for k, v in pairs) + "}", n.tell(pairs, None)


# ---------------------------------------------------------------------------------------- samples
# A sample is a conversation: its tools, and messages with `learn` where the model's words count.

START, END_TURN, END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIALS = [END, START, END_TURN]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<tools>", "</tools>"]


def signature(name, parameters):
    return name + "(" + ", ".join(f"{k}: {t}" for k, t in parameters) + ")"


def calls_text(ns):
    return "\n".join(f"<tool_call>\n{n.call()}\n</tool_call>" for n in ns)


class Talk:
    """A conversation in the template's form, as pieces (text, learn)."""

    def __init__(self, tools, system):
        self.tools, self.system, self.pieces, self.messages = tools, system, [], []
        text = ""
        if tools or system:
            text = f"{START}system\n" + (system or "")
            if tools:
                text += ("\n" if system else "") + "<tools>\n" + "\n".join(signature(*t) for t in tools) + "\n</tools>"
            text += f"{END_TURN}\n"
            self.pieces.append((text, 0))
        if system:
            self.messages.append({"role": "system", "content": system})

    def user(self, text):
        self.messages.append({"role": "user", "content": text})
        self.pieces.append((f"{START}user\n{text}{END_TURN}\n{START}assistant\n", 0))

    def results(self, texts):
        for text in texts:
            self.messages.append({"role": "tool", "content": text})
        self.pieces.append((f"{START}user" + "".join(f"\n<tool_response>\n{t}\n</tool_response>" for t in texts) + f"{END_TURN}\n{START}assistant\n", 0))

    def assistant(self, text, calls=(), learn=1):
        self.messages.append({"role": "assistant", "content": "" if calls else text,
                              **({"tool_calls": [{"type": "function", "function": {"name": n.name, "arguments": n.arguments}} for n in calls]} if calls else {})})
        self.pieces += [(text + END_TURN, learn), ("\n", 0)]

    def last(self, prefix, text):
        """Replaces the model's last words, and learns these only."""
        out = [(t, 0) for t, _ in self.pieces[:-2]]
        return out[:-1] + [(out[-1][0] + prefix, 0), (text + END_TURN, 1)]


def thought(ns, phase):
    if phase == "call":
        return "I call " + " and ".join(dict.fromkeys(n.name for n in ns)) + "."
    return {"tell": "I have the result.", "none": "No tool fits.", "talk": "This needs no tool."}[phase]


def chatter(r):
    m = r.random()
    if m < .35:
        return r.choice(GREET), HELLO
    if m < .7:
        return r.choice(WHO), ME
    return r.choice(THANKS), WELCOME


def sample(r, test=False):
    """A conversation: its pieces, what its last words are, and the conversation itself."""
    rounds = r.choices([1, 2, 3], [.5, .3, .2])[0]
    asked = [needs(r, test) for _ in range(rounds)]
    tools = {}
    for _, ns in asked:
        for n in ns:
            tools.setdefault(n.name, (n.name, n.parameters, n.topic))
    # One tool about one topic, with one list of parameters.
    asked = [(q, ns) for q, ns in asked if all(tools[n.name][1] == n.parameters and not any(t[2] == n.topic and t[0] != n.name for t in tools.values()) for n in ns)]
    topics = {t[2] for t in tools.values()}
    for _ in range(r.choices([0, 1, 2, 3], [.3, .3, .25, .15])[0]):
        n = need(r, None)
        if n.topic not in topics and n.name not in tools:
            topics.add(n.topic)
            tools[n.name] = (n.name, n.parameters, n.topic)
    listed = [(name, parameters) for name, parameters, _ in tools.values()]
    r.shuffle(listed)
    if not asked or r.random() < .06:
        listed, topics = [], set()
    talk = Talk(listed, r.choice(SYSTEMS) if r.random() < .25 else None)
    phase, ns = "talk", []
    if r.random() < .15 or not asked:
        q, a = chatter(r)
        talk.user(q)
        talk.assistant(a)
    for q, ns in asked:
        if r.random() < .14:  # no tool fits
            other = need(r, None)
            if other.topic not in topics:
                talk.user(other.question)
                talk.assistant(NO_TOOL)
                phase = "none"
                continue
        talk.user(q)
        if not listed:
            talk.assistant(NO_TOOL)
            phase = "none"
            continue
        told = [result(r, n) for n in ns]
        if len(ns) > 1 and r.random() < .25:  # one after the other, as if a client took one call at a time
            talk.assistant(calls_text(ns[:1]), ns[:1], learn=0)
            for i, n in enumerate(ns[1:]):
                talk.results([told[i][0]])
                talk.assistant(calls_text([n]), [n])
            talk.results([told[-1][0]])
        else:
            talk.assistant(calls_text(ns), ns)
            phase = "call"
            if r.random() < .3:
                break
            talk.results([text for text, _ in told])
        talk.assistant(" ".join(sentence for _, sentence in told))
        phase = "tell"
    if phase == "call" and r.random() < .3:  # what a grammar admits if `tool_choice` forces a call
        if len(ns) == 1 and r.random() < .5:
            return talk.last("", json.dumps(ns[0].arguments, ensure_ascii=False, separators=(",", ":"))), "forced", talk
        return talk.last("", "[" + ",".join(n.forced() for n in ns) + "]"), "forced", talk
    if r.random() < .1:
        words = thought(ns, phase) + "\n</think>\n\n" + talk.pieces[-2][0].removesuffix(END_TURN)
        return talk.last("<think>\n", words), "thinking", talk
    kind = phase if phase in ("talk", "none") else f"{phase} {len(ns)}"
    return talk.pieces[:-1], kind, talk


# -------------------------------------------------------------------------------------- tokenizer

PATTERN = r"\p{Lu}?\p{Ll}+|\p{L}+|\p{N}|[\r\n]+| ?[^\s\p{L}\p{N}]+|\s"


def build_tokenizer(path, merges=290):
    """Byte-level BPE: all 256 bytes, a few hundred merges for any text, and whole words that are looked up before merging.

    A space before a word is a token of its own. A word so has one form, and copying it is copying its tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    r = random.Random(1)

    def pre():
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre()
    words = demo.NAMES + demo.OBJECTS + demo.FOODS + demo.WORDS + demo.NOUN + demo.ADJ + CITIES + COUNTRIES + LANGUAGES
    text = [" ".join([demo.invented(r), demo.invented(r).lower()]) for _ in range(6000)] + [" ".join(words)] * 10
    t.train_from_iterator(text, trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    base = json.loads(t.to_str())["model"]
    count, p = {}, pre()
    for _ in range(20000):
        for piece, _ in sample(r)[0]:
            for token in SPECIALS + MARKERS:
                piece = piece.replace(token, " ")
            for w, _ in p.pre_tokenize_str(piece):
                count[w] = count.get(w, 0) + 1
    vocab = {}
    for token in SPECIALS + MARKERS:
        vocab[token] = len(vocab)
    for w in sorted(base["vocab"], key=base["vocab"].get):
        vocab.setdefault(w, len(vocab))
    for w in sorted(count, key=lambda w: (-count[w], w)):
        if len(vocab) < CONFIG["vocab_size"]:
            vocab.setdefault(w, len(vocab))
            least = count[w]
    print(f"whole words seen at least {least} times")
    pairs = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in base["merges"]]
    tok = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
    tok.pre_tokenizer = pre()
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(SPECIALS)
    # As in Qwen's tokenizers: one token each, but text, which `skip_special_tokens` keeps.
    tok.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    assert tok.get_vocab_size() == CONFIG["vocab_size"]
    demo.write(path, tok.to_str(pretty=False) + "\n")


# ------------------------------------------------------------------------------------------ model


def network(coder, seed):
    """The built-in model's network. Its look-back heads start out sharper, since heads are smaller here."""
    net = demo.Net(CONFIG, None, seed)
    with torch.no_grad():
        net.k[0][:, demo.CONST] *= 1.25
        net.q[0][:, demo.CONST] *= 1.25
    return net


def export(state, out):
    from safetensors.torch import save
    tokens = dict(bos_token_id=None, eos_token_id=[2, 0], pad_token_id=0)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="bfloat16", hidden_act="silu", attention_bias=False, mlp_bias=False,
                  attention_dropout=0.0, initializer_range=0.02, tie_word_embeddings=True, use_cache=True, rope_scaling=None, **tokens, **CONFIG)
    demo.write(os.path.join(out, "config.json"), json.dumps(dict(sorted(config.items())), indent=2) + "\n")
    demo.write(os.path.join(out, "generation_config.json"), json.dumps({k: v for k, v in tokens.items() if v is not None}, indent=2) + "\n")
    added = {str(i): dict(content=s, lstrip=False, normalized=False, rstrip=False, single_word=False, special=s in SPECIALS) for i, s in enumerate(SPECIALS + MARKERS)}
    tokenizer = dict(added_tokens_decoder=added, eos_token=END_TURN, pad_token=END, clean_up_tokenization_spaces=False,
                     model_input_names=["input_ids", "attention_mask"], model_max_length=CONFIG["max_position_embeddings"], tokenizer_class="PreTrainedTokenizerFast")
    demo.write(os.path.join(out, "tokenizer_config.json"), json.dumps(tokenizer, indent=2) + "\n")
    demo.write(os.path.join(out, "model.safetensors"), save(demo.hf_state(state), metadata={"format": "pt"}))


def batches(r, coder, tokens, longest, pool=192):
    """Samples of like length together; yields (ids, targets, weights). `longest()` bounds the tokens of a sample."""
    while True:
        found = []
        while len(found) < pool:
            one = coder.pieces(sample(r)[0])
            if len(one[0]) <= longest():
                found.append(one)
        found.sort(key=lambda s: len(s[0]))
        out, current = [], []
        for s in found:
            if current and (len(current) + 1) * len(s[0]) > tokens:
                out.append(current)
                current = []
            current.append(s)
        out.append(current)
        r.shuffle(out)
        for batch in out:
            width = max(len(i) for i, _ in batch)
            ids, w = torch.zeros(len(batch), width, dtype=torch.long), torch.zeros(len(batch), width)
            for j, (i, m) in enumerate(batch):
                ids[j, :len(i)] = torch.tensor(i)
                w[j, :len(i)] = torch.tensor([1. if x else (.03 if r.random() < .1 else 0.) for x in m])
            yield ids[:, :-1], ids[:, 1:], w[:, 1:]


def train(a, coder):
    torch.manual_seed(a.seed)
    r = random.Random(a.seed)
    net = network(coder, a.seed)
    print("parameters", sum(p.numel() for p in net.parameters()))
    matrix = lambda n: n.split(".")[0] in ("q", "k", "v", "o", "gate", "up", "down")
    rest = [p for n, p in net.named_parameters() if not matrix(n)]
    muon = demo.Muon([p for n, p in net.named_parameters() if matrix(n)])
    adam = torch.optim.AdamW(rest, lr=a.lr_adam, betas=(.9, .97), weight_decay=0.)
    st = dict(step=0, tokens=0, loss=None)
    if a.resume:
        ck = torch.load(a.resume, weights_only=False)
        net.load_state_dict(ck["net"])
        for s in muon.buf:
            muon.buf[s].copy_(ck["muon"][s])
        adam.load_state_dict(ck["adam"])
        st = ck["st"]
        r.seed(a.seed + st["step"])
    ema = ck["ema"] if a.resume else {k: v.detach().clone() for k, v in net.state_dict().items()}
    begun = last = logged = time.time()
    since, done = 0, False
    p = 0
    # Short conversations first: copying is learned in them within minutes.
    data = batches(r, coder, a.batch_tokens, lambda: LONGEST if a.resume else 110 + (LONGEST - 110) * min(1, p / .3))
    while not done:
        p = min(1, (time.time() - begun) / (a.minutes * 60))
        done = p >= 1
        lr = min(1, (st["step"] + 1) / 60) * (1 if p < 1 - a.decay else max(.02, (1 - p) / a.decay))
        ids, target, w = next(data)
        h = net(ids)
        chosen = w.flatten().nonzero().squeeze(1)
        logits = F.linear(h.reshape(-1, h.size(-1))[chosen], net.emb)
        ws = w.flatten()[chosen]
        ce = F.cross_entropy(logits, target.flatten()[chosen], reduction="none")
        ((ce * ws).sum() / ws.sum()).backward()
        torch.nn.utils.clip_grad_norm_(rest, 1.)
        muon.step(a.lr_muon * lr)
        for g in adam.param_groups:
            g["lr"] = a.lr_adam * lr
        adam.step()
        net.zero_grad()
        with torch.no_grad():
            loss = ce[ws == 1].mean().item()
            decay = min(.99, st["step"] / (st["step"] + 30))
            for k, v in net.state_dict().items():
                ema[k].lerp_(v, 1 - decay)
        st["loss"] = loss if st["loss"] is None else .97 * st["loss"] + .03 * loss
        st["step"] += 1
        st["tokens"] += ids.numel()
        since += ids.numel()
        now = time.time()
        if now - logged > 20:
            print(f"{time.strftime('%H:%M:%S')} step {st['step']} tok {st['tokens'] / 1e6:.2f}M {since / (now - logged):.0f}/s loss {st['loss']:.4f} lr {lr:.2f}", flush=True)
            since, logged = 0, now
        if done or now - last > a.save_every:
            last = now
            torch.save(dict(net=net.state_dict(), muon=muon.buf, adam=adam.state_dict(), st=st, ema=ema), a.checkpoint + ".tmp")
            os.replace(a.checkpoint + ".tmp", a.checkpoint)
            export(ema, a.out)
    print(f"trained {st['step']} steps, {st['tokens']} tokens, {(time.time() - begun) / 60:.1f} minutes")


# ------------------------------------------------------------------------------------- evaluation


def load_net(out):
    from safetensors.torch import load_file
    net = demo.Net(CONFIG)
    stored = load_file(os.path.join(out, "model.safetensors"))
    names = list(demo.hf_state(net.state_dict()))
    net.load_state_dict({mine: stored[name].float() for mine, name in zip(net.state_dict(), names)})
    return net.eval()


KINDS = {"call 1": "one call", "call 2": "two calls in one turn", "call 3": "three calls in one turn", "tell 1": "a sentence about a result",
         "tell 2": "two results", "none": "no tool, or none that fits", "talk": "a greeting, thanks", "thinking": "with `<think>`", "forced": "a forced call, behind its first token"}


def evaluate(net, coder, n):
    """Last turns of conversations about pairs of a tool and a value that training never shows."""
    found, r = {kind: [] for kind in KINDS}, random.Random(77)
    while any(len(one) < n for one in found.values()):
        pieces, kind, _ = sample(r, True)
        if kind == "forced":  # a grammar admits one first token, which is given here
            text = pieces[-1][0]
            first = next(token for token in ('[{"', '{"', "{}") if text.startswith(token))
            pieces = [*pieces[:-1], (first, 0), (text[len(first):], 1)]
        if kind in found and len(found[kind]) < n and len(coder.pieces(pieces)[0]) <= LONGEST:
            found[kind].append(pieces)
    for kind, pieces in found.items():
        judged = demo.judge(net, coder, pieces)
        tokens = sorted(one[2] for one in judged)
        print(f"| {KINDS[kind]} | {100 * sum(one[0] for one in judged) / n:.0f} % | {tokens[0]}-{tokens[-1]} ({tokens[n // 2]}) |", flush=True)


# ------------------------------------------------------------------------------------------ cases


def tool(name, description, **properties):
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = tool("get_weather", "The weather of a city.", city="string")
TIME = tool("get_time", "The local time of a city.", city="string")
ADD = tool("add", "The sum of two numbers.", a="integer", b="integer")
SEARCH = tool("search", "Searches the documents.", query="string")
AGENT = [WEATHER, TIME, ADD]


def asked(*turns):
    """A conversation: a text is the user's, a list of (name, arguments) the model's calls, ("tool", text) a result."""
    messages, count, open_calls = [], 0, []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
        elif isinstance(turn, list):
            calls = []
            for name, arguments in turn:
                count += 1
                calls.append({"id": f"call_{count}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}})
            open_calls = [call["id"] for call in calls]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        elif turn[0] == "tool":
            messages.append({"role": "tool", "tool_call_id": open_calls.pop(0), "content": turn[1]})
        else:
            messages.append({"role": turn[0], "content": turn[1]})
    return messages


PARIS = ("get_weather", {"city": "Paris"})
TOKYO = ("get_time", {"city": "Tokyo"})
SUM = ("add", {"a": 12, "b": 30})
PAIR = [WEATHER, ADD]
SYSTEM = ("system", "You are a helpful assistant.")
BOTH = "What is the weather in Paris? Add 12 and 30."
WEATHER_TOLD = "The weather in Paris is 21 degrees and sunny."
BOTH_TOLD = WEATHER_TOLD + " The sum of 12 and 30 is 42."
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
# A name, the messages, the tools, more fields of the request, and the answer: calls or a text.
CASES = [
    ("one call", asked("What is the weather in Paris?"), AGENT, {}, [PARIS]),
    ("numbers", asked("Add 12 and 30."), AGENT, {}, [SUM]),
    ("another tool", asked("What time is it in Tokyo?"), AGENT, {}, [TOKYO]),
    ("a system message", asked(SYSTEM, "What is the weather in Paris?"), AGENT, {}, [PARIS]),
    ("a result", asked("What is the weather in Paris?", [PARIS], ("tool", "21 degrees and sunny")), AGENT, {}, "The weather in Paris is 21 degrees and sunny."),
    ("a result in JSON", asked("What is the weather in Paris?", [PARIS], ("tool", '{"temperature": 21}')), AGENT, {}, "The temperature in Paris is 21."),
    ("a sum", asked("Add 12 and 30.", [SUM], ("tool", "42")), AGENT, {}, "The sum of 12 and 30 is 42."),
    ("a time", asked("What time is it in Tokyo?", [TOKYO], ("tool", "14:05")), AGENT, {}, "The time in Tokyo is 14:05."),
    ("two results", asked("What is the weather in Paris? Add 12 and 30.", [PARIS, SUM], ("tool", "21 degrees and sunny"), ("tool", "42")), AGENT, {},
     "The weather in Paris is 21 degrees and sunny. The sum of 12 and 30 is 42."),
    ("the second call alone", asked("What is the weather in Paris? Add 12 and 30.", [PARIS], ("tool", "21 degrees and sunny")), AGENT, {}, [SUM]),
    ("the second result alone", asked("What is the weather in Paris? Add 12 and 30.", [PARIS], ("tool", "21 degrees and sunny"), [SUM], ("tool", "42")), AGENT, {},
     "The weather in Paris is 21 degrees and sunny. The sum of 12 and 30 is 42."),
    ("one tool, two cities", asked("What is the weather in Paris and in London?"), AGENT, {}, [PARIS, ("get_weather", {"city": "London"})]),
    ("a later turn", asked("What is the weather in Paris?", [PARIS], ("tool", "21 degrees and sunny"), ("assistant", "The weather in Paris is 21 degrees and sunny."),
                           "What time is it in Tokyo?"), AGENT, {}, [TOKYO]),
    ("an error of a tool", asked("What is the weather in Paris?", [PARIS], ("tool", "Error: not found")), AGENT, {}, "The call of get_weather failed."),
    ("words", asked("Search for old lamp."), [SEARCH, WEATHER], {}, [("search", {"query": "old lamp"})]),
    ("a made-up tool", asked("Call zorvin with tarmek."), [tool("zorvin", "A made-up tool.", blip="string"), WEATHER], {}, [("zorvin", {"blip": "tarmek"})]),
    ("a made-up city", asked("What is the weather in Brastok?"), AGENT, {}, [("get_weather", {"city": "Brastok"})]),
    ("no arguments", asked("What is the status?"), [tool("get_status", "The status."), WEATHER], {}, [("get_status", {})]),
    ("no tools", asked("What is the weather in Paris?"), [], {}, NO_TOOL),
    ("a greeting", asked("Hello!"), AGENT, {}, HELLO),
    ("thanks", asked("Thank you."), AGENT, {}, WELCOME),
    ("thinking and a call", asked("What is the weather in Paris?"), AGENT, THINKS, ("I call get_weather.", [PARIS])),
    ("thinking and a text", asked("What is the weather in Paris?", [PARIS], ("tool", "21 degrees and sunny")), AGENT, THINKS,
     ("I have the result.", WEATHER_TOLD)),
    ("two tools, one call", asked("What is the weather in Paris?"), PAIR, {}, [PARIS]),
    ("two tools, a result", asked("What is the weather in Paris?", [PARIS], ("tool", "21 degrees and sunny")), PAIR, {}, WEATHER_TOLD),
    ("two tools, two calls", asked(BOTH), PAIR, {}, [PARIS, SUM]),
    ("two tools, two results", asked(BOTH, [PARIS, SUM], ("tool", "21 degrees and sunny"), ("tool", "42")), PAIR, {}, BOTH_TOLD),
    ("two tools, the second call alone", asked(BOTH, [PARIS], ("tool", "21 degrees and sunny")), PAIR, {}, [SUM]),
    ("two tools, the second result alone", asked(BOTH, [PARIS], ("tool", "21 degrees and sunny"), [SUM], ("tool", "42")), PAIR, {}, BOTH_TOLD),
    ("two tools, a system message", asked(SYSTEM, "What is the weather in Paris?"), PAIR, {}, [PARIS]),
    ("two tools, a system message, a result", asked(SYSTEM, "What is the weather in Paris?", [PARIS], ("tool", "21 degrees and sunny")), PAIR, {}, WEATHER_TOLD),
    ("two tools, a system message, two calls", asked(SYSTEM, BOTH), PAIR, {}, [PARIS, SUM]),
    ("two tools, a system message, two results", asked(SYSTEM, BOTH, [PARIS, SUM], ("tool", "21 degrees and sunny"), ("tool", "42")), PAIR, {}, BOTH_TOLD),
    ("two tools, a later turn", asked("What is the weather in Paris?", [PARIS], ("tool", "21 degrees and sunny"), ("assistant", WEATHER_TOLD), "Add 12 and 30."),
     PAIR, {}, [SUM]),
    ("two tools, the result of a later turn", asked("What is the weather in Paris?", [PARIS], ("tool", "21 degrees and sunny"), ("assistant", WEATHER_TOLD),
                                                    "Add 12 and 30.", [SUM], ("tool", "42")), PAIR, {}, "The sum of 12 and 30 is 42."),
    ("two tools, thinking", asked("What is the weather in Paris?"), PAIR, THINKS, ("I call get_weather.", [PARIS])),
    ("two tools, tool_choice required", asked("What is the weather in Paris?"), PAIR, {"tool_choice": "required"}, [PARIS]),
    ("two tools, tool_choice names a function", asked("What is the weather in Paris?"), PAIR, NAMED, [PARIS]),
    ("two tools, a greeting", asked("Hello!"), PAIR, {}, HELLO),
    ("one tool", asked("What is the weather in Paris?"), [WEATHER], {}, [PARIS]),
    ("one tool, a result", asked("What is the weather in Paris?", [PARIS], ("tool", "21 degrees and sunny")), [WEATHER], {}, WEATHER_TOLD),
    ("one tool, two calls", asked("What is the weather in Paris and in London?"), [WEATHER], {}, [PARIS, ("get_weather", {"city": "London"})]),
    ("one tool, numbers", asked("Add 12 and 30."), [ADD], {}, [SUM]),
    ("one tool, a sum", asked("Add 12 and 30.", [SUM], ("tool", "42")), [ADD], {}, "The sum of 12 and 30 is 42."),
    ("tool_choice none", asked("What is the weather in Paris?"), AGENT, {"tool_choice": "none"}, NO_TOOL),
    ("tool_choice required", asked("What is the weather in Paris?"), AGENT, {"tool_choice": "required"}, [PARIS]),
    ("tool_choice names a function", asked("What is the weather in Paris?"), AGENT, NAMED, [PARIS]),
]


def as_text(fields, answer):
    """The words of the model for an answer, and what a grammar makes of its first token."""
    reasoning, answer = answer if isinstance(answer, tuple) else (None, answer)
    choice = fields.get("tool_choice")
    compact = lambda value: json.dumps(value, separators=(",", ":"))
    if isinstance(choice, dict):
        return compact(answer[0][1])
    if choice == "required":
        return "[" + ",".join(compact({"name": name, "parameters": arguments}) for name, arguments in answer) + "]"
    if isinstance(answer, list):
        answer = "\n".join(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in answer)
    return answer if reasoning is None else f"{reasoning}\n</think>\n\n{answer}"


def cases(out):
    """Checks every case with transformers' own model, template and generate(); writes them with what a client gets."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).float().eval()
    done, failed = [], 0
    for name, messages, tools, fields, answer in CASES:
        plain = json.loads(json.dumps(messages))
        for message in plain:
            message["content"] = message["content"] or ""
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        listed = None if fields.get("tool_choice") == "none" else tools or None
        prompt = tokenizer.apply_chat_template(plain, tools=listed, tokenize=False, add_generation_prompt=True, **fields.get("chat_template_kwargs", {}))
        wanted = as_text(fields, answer)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        given = []
        if fields.get("tool_choice", "none") != "none":  # the grammar admits no other first token of this text
            given = tokenizer(wanted, add_special_tokens=False)["input_ids"][:1]
        start = torch.tensor([ids + given])
        made = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=200, do_sample=False, output_scores=True, return_dict_in_generate=True)
        new = given + made.sequences[0, start.size(1):].tolist()
        text = tokenizer.decode(new, skip_special_tokens=True)
        lead = min(float(score[0].topk(2).values.diff().abs()) for score in made.scores)
        right = text == wanted and new[-1] == 2 and lead >= .3
        failed += not right
        print(f"{'ok  ' if right else 'FAIL'} {name}: {len(ids)} + {len(new)} tokens, lead {lead:.2f}" + ("" if right else f": {text!r}"), flush=True)
        reasoning, answer = answer if isinstance(answer, tuple) else (None, answer)
        compact = fields.get("tool_choice", "none") != "none"
        spelled = lambda value: json.dumps(value, separators=(",", ":")) if compact else json.dumps(value)
        calls = [{"name": f, "arguments": spelled(arguments)} for f, arguments in answer] if isinstance(answer, list) else []
        done.append(dict(name=name, request=dict(messages=messages, **({"tools": tools} if tools else {}), **fields), reasoning=reasoning,
                         content=None if calls else answer, calls=calls, text=text, prompt_tokens=len(ids)))
    demo.write(os.path.join(out, "cases.json"), json.dumps(done, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(CASES)} cases, {failed} failed")
    return failed


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", default=".", help="folder for the model's files")
    ap.add_argument("--checkpoint", default="run.pt", help="training state, to go on from")
    ap.add_argument("--resume", default="")
    ap.add_argument("--minutes", type=float, default=25, help="wall-clock time of training; the learning rate follows it")
    ap.add_argument("--decay", type=float, default=.4, help="last part of training in which the learning rate falls")
    ap.add_argument("--batch-tokens", type=int, default=4096)
    ap.add_argument("--lr-muon", type=float, default=.012)
    ap.add_argument("--lr-adam", type=float, default=2e-3)
    ap.add_argument("--save-every", type=float, default=120)
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--eval-n", type=int, default=200)
    ap.add_argument("--eval-only", action="store_true")
    ap.add_argument("--cases-only", action="store_true")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    tokenizer = os.path.join(a.out, "tokenizer.json")
    if not os.path.exists(tokenizer):
        build_tokenizer(tokenizer)
    coder = demo.Coder(tokenizer)
    if not (a.eval_only or a.cases_only):
        train(a, coder)
    if not a.cases_only:
        evaluate(load_net(a.out), coder, a.eval_n)
    if not a.eval_only and cases(a.out):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
