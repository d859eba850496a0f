//! GGUF files: values of every type, metadata as files of a checkpoint, and files that are not sound.

use safetensors::SafeTensors;

use super::*;
use crate::model::ModelFiles;
use crate::model::config::{ModelConfig, RopeScaling};
use crate::model::identity::identity;
use crate::model::tokenizer::{SpecialTokens, Tokenizer};
use crate::model::weights::Weights;

mod bounds;
mod families;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn contents(name: &str) -> Vec<u8> {
    std::fs::read(fixture(name)).expect("the fixture is readable")
}

/// A GGUF file that a test puts together.
#[derive(Clone, Default)]
struct GgufSketch {
    values: Vec<u8>,
    count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl GgufSketch {
    fn key(&mut self, key: &str, kind: u32) -> &mut Vec<u8> {
        self.count += 1;
        push_text(&mut self.values, key);
        self.values.extend(kind.to_le_bytes());
        &mut self.values
    }

    fn text(mut self, key: &str, text: &str) -> Self {
        push_text(self.key(key, 8), text);
        self
    }

    fn size(mut self, key: &str, size: u32) -> Self {
        self.key(key, 4).extend(size.to_le_bytes());
        self
    }

    fn number(mut self, key: &str, number: f32) -> Self {
        self.key(key, 6).extend(number.to_le_bytes());
        self
    }

    fn flag(mut self, key: &str, flag: bool) -> Self {
        self.key(key, 7).push(u8::from(flag));
        self
    }

    fn texts(mut self, key: &str, texts: &[&str]) -> Self {
        let values = self.key(key, 9);
        values.extend(8_u32.to_le_bytes());
        values.extend((texts.len() as u64).to_le_bytes());
        texts.iter().for_each(|text| push_text(values, text));
        self
    }

    fn wholes(mut self, key: &str, wholes: &[i32]) -> Self {
        let values = self.key(key, 9);
        values.extend(5_u32.to_le_bytes());
        values.extend((wholes.len() as u64).to_le_bytes());
        wholes.iter().for_each(|whole| values.extend(whole.to_le_bytes()));
        self
    }

    /// A tensor of type `kind`; `dimensions` from the innermost.
    fn tensor(self, name: &str, dimensions: &[u64], kind: u32, bytes: &[u8]) -> Self {
        let offset = self.data.len() as u64;
        self.described(name, dimensions, kind, offset).bytes(bytes)
    }

    fn described(mut self, name: &str, dimensions: &[u64], kind: u32, offset: u64) -> Self {
        self.tensor_count += 1;
        push_text(&mut self.tensors, name);
        self.tensors.extend((dimensions.len() as u32).to_le_bytes());
        dimensions.iter().for_each(|size| self.tensors.extend(size.to_le_bytes()));
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self
    }

    fn floats(self, name: &str, dimensions: &[u64], first: f32) -> Self {
        let count: u64 = dimensions.iter().product();
        let bytes: Vec<u8> = (0..count).flat_map(|at| (first + at as f32).to_le_bytes()).collect();
        self.tensor(name, dimensions, 0, &bytes)
    }

    fn file(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend(self.tensor_count.to_le_bytes());
        file.extend(self.count.to_le_bytes());
        file.extend(&self.values);
        file.extend(&self.tensors);
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(&self.data);
        file
    }
}

fn push_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// Metadata of a model with one layer, two heads of 4, and a byte-level vocabulary.
fn metadata(architecture: &str) -> GgufSketch {
    metadata_of(architecture, 1)
}

fn metadata_of(architecture: &str, layers: u32) -> GgufSketch {
    let key = |key: &str| format!("{architecture}.{key}");
    GgufSketch::default()
        .text("general.architecture", architecture)
        .size(&key("context_length"), 64)
        .size(&key("embedding_length"), 8)
        .size(&key("block_count"), layers)
        .size(&key("feed_forward_length"), 8)
        .size(&key("attention.head_count"), 2)
        .size(&key("attention.head_count_kv"), 1)
        .number(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "qwen2")
        .texts("tokenizer.ggml.tokens", &["a", "b", "ab", "<|im_end|>"])
        .wholes("tokenizer.ggml.token_type", &[1, 1, 1, 3])
        .texts("tokenizer.ggml.merges", &["a b"])
}

/// The same with the tensors outside the layers and the projection of queries.
fn model(architecture: &str) -> GgufSketch {
    metadata(architecture)
        .floats("token_embd.weight", &[8, 4], 0.0)
        .floats("output_norm.weight", &[8], 100.0)
        .floats("blk.0.attn_q.weight", &[8, 8], 0.0)
}

/// The same with two experts.
fn mixture() -> GgufSketch {
    model("qwen3moe").size("qwen3moe.expert_count", 2).size("qwen3moe.expert_used_count", 1)
}

fn opened(sketch: &GgufSketch) -> Result<GgufFiles, ModelError> {
    GgufFiles::from_bytes("m.gguf", &sketch.file())
}

/// Asserts that a file is refused with a text.
fn refused(sketch: &GgufSketch, words: &str) {
    let error = opened(sketch).expect_err(words).to_string();
    assert!(error.contains(words) && error.contains("m.gguf"), "{error}");
}

#[test]
fn every_type_reads_as_the_reference_package_reads_it() {
    let (file, golden) = (contents("gguf_types/types.gguf"), contents("gguf_types/types.safetensors"));
    let header = GgufHeader::read("types.gguf", &file).expect("a header");
    let golden = SafeTensors::deserialize(&golden).expect("safetensors");
    assert_eq!(header.tensors().len(), 15);
    for tensor in header.tensors() {
        let wanted = golden.tensor(tensor.name).expect("a golden tensor");
        assert_eq!(wanted.shape(), tensor.shape, "{}", tensor.name);
        let wanted: Vec<u32> =
            wanted.data().as_chunks::<4>().0.iter().map(|raw| u32::from_le_bytes(*raw)).collect();
        let bytes = &file[tensor.start..tensor.end];
        // The whole, and ranges that begin and end within blocks.
        for (start, end) in [(0, wanted.len()), (1, 2), (17, wanted.len() - 5), (31, 33)] {
            let mut out = vec![0.0; end - start];
            tensor.kind.read_f32(bytes, start, &mut out);
            let out: Vec<u32> = out.into_iter().map(f32::to_bits).collect();
            assert_eq!(out, wanted[start..end], "{} {start}..{end}", tensor.name);
        }
    }
}

#[test]
fn metadata_becomes_the_configuration_of_the_checkpoint() {
    let llama = ModelFiles::at(&fixture("llama3-gguf")).expect("a model");
    let config = ModelConfig::read(&llama).expect("a configuration");
    assert_eq!((config.spec.model_type, config.hidden, config.layers), ("llama", 256, 2));
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (4, 2, 32));
    assert_eq!((config.vocab, config.max_positions, config.tied), (512, 160, false));
    assert_eq!(config.norm_eps, 1e-5);
    assert_eq!(config.attention.rope.theta, 500_000.0);
    let wanted = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 64.0,
    };
    // Any original context with the same frequencies is as good.
    let same = crate::model::config::Rope { scaling: wanted, ..config.attention.rope.clone() };
    assert_eq!(config.attention.rope.frequencies(32), same.frequencies(32));
    assert_eq!(config.bos, Some(506));
    assert_eq!(llama.default_name(), "model");

    let qwen = ModelFiles::at(&fixture("qwen2-gguf/model.gguf")).expect("a model");
    let config = ModelConfig::read(&qwen).expect("a configuration");
    assert_eq!((config.spec.model_type, config.tied, config.biases.qkv), ("qwen2", true, true));
    // Rows that pad the embedding have no tokens.
    assert_eq!((config.vocab, Tokenizer::load(&qwen).expect("a tokenizer").vocab()), (520, 512));
    assert_eq!(config.eos, [507, 505]);
    assert_eq!((config.generation.temperature, config.generation.top_k), (Some(0.6), Some(20)));
}

#[test]
fn sentencepiece_divides_texts_as_in_transformers() {
    let file = contents("gguf_types/sentencepiece.gguf");
    let header = GgufHeader::read("s.gguf", &file).expect("a header");
    let vocabulary = Vocabulary::read(&header).expect("a vocabulary");
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, value: Value| {
        std::fs::write(folder.path().join(name), value.to_string()).expect("written");
    };
    write("tokenizer.json", vocabulary.tokenizer().expect("a tokenizer"));
    write("tokenizer_config.json", vocabulary.config().expect("its configuration"));
    let tokenizer = Tokenizer::load(&ModelFiles::Dir(folder.path().into())).expect("it loads");
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    assert!(tokenizer.config()["chat_template"].as_str().expect("a template").contains("bos_token"));
    let cases: Value =
        serde_json::from_slice(&contents("gguf_types/sentencepiece.json")).expect("golden texts");
    let cases = cases.as_array().expect("a list");
    assert!(cases.len() > 30);
    for case in cases {
        let text = case["text"].as_str().expect("a text");
        let wanted: Vec<u64> =
            case["ids"].as_array().expect("ids").iter().filter_map(Value::as_u64).collect();
        let ids = tokenizer.encode(text, SpecialTokens::AsWritten, 1000).expect("short");
        assert_eq!(ids.iter().map(|id| u64::from(*id)).collect::<Vec<_>>(), wanted, "{text:?}");
        let with_bos = tokenizer.encode(text, SpecialTokens::Add, 1000).expect("short");
        assert_eq!((with_bos[0], &with_bos[1..]), (1, &ids[..]), "{text:?}");
    }
}

#[test]
fn the_rows_of_llamas_heads_are_put_back() {
    let order: Vec<usize> = head_rows(8, 2).expect("whole heads").collect();
    assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
    assert!(head_rows(6, 2).is_none() && head_rows(8, 0).is_none() && head_rows(8, usize::MAX).is_none());

    let folder = tempfile::tempdir().expect("a folder");
    for (architecture, second) in [("llama", 16.0), ("qwen3", 8.0)] {
        std::fs::write(folder.path().join("m.gguf"), model(architecture).file()).expect("written");
        let weights = Weights::open(&ModelFiles::at(folder.path()).expect("a model")).expect("weights");
        let query = weights.tensor("model.layers.0.self_attn.q_proj.weight", &[8, 8]).expect("its shape");
        let mut row = [0.0; 2];
        query.read_f32(8, &mut row);
        assert_eq!(row, [second, second + 1.0], "{architecture}");
        let error = weights.tensor("lm_head.weight", &[4, 8]).expect_err("the embedding is tied").to_string();
        assert!(error.contains("m.gguf") && error.contains("lm_head.weight"), "{error}");
    }
}

#[test]
fn a_block_that_spans_rows_of_heads_is_refused() {
    // One dimension of 256 values is one block: no row of it can be moved.
    let bias = |kind, bytes: &[u8]| model("llama").tensor("blk.0.attn_q.bias", &[256], kind, bytes);
    refused(&bias(12, &[0; 144]), "blk.0.attn_q.bias has shape [256]");
    refused(&model("llama").tensor("blk.0.attn_k.bias", &[32], 8, &[0; 34]), "which is not one of heads");
    assert!(!check(&bias(12, &[0; 144]).file()));
    let allowed = [
        bias(0, &[0; 1024]),
        bias(1, &[0; 512]),
        model("llama").tensor("blk.0.attn_k.weight", &[256, 4], 12, &[0; 576]),
    ];
    for sketch in allowed {
        assert!(check(&sketch.file()));
    }
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let with = |sketch: GgufSketch, words: &str| refused(&sketch, words);
    refused(&model("starcoder2"), "architecture starcoder2");
    with(model("qwen3").size("qwen3.expert_count", 8), "qwen3.expert_count 8");
    with(model("llama").size("llama.expert_count", 8), "llama.expert_used_count is absent");
    with(model("llama").size("llama.expert_count", 1025), "more than 1024");
    with(model("qwen3moe"), "qwen3moe.expert_count is absent");
    with(mixture().size("qwen3moe.expert_gating_func", 2), "qwen3moe.expert_gating_func 2");
    with(mixture().flag("qwen3moe.expert_weights_norm", false), "qwen3moe.expert_weights_norm false");
    with(mixture().size("qwen3moe.expert_shared_count", 1), "qwen3moe.expert_shared_count 1");
    with(mixture().floats("blk.0.ffn_up_exps.weight", &[8, 6, 3], 0.0), "not one of 2 experts");
    with(model("qwen2").number("qwen2.attn_logit_softcapping", 9.0), "qwen2.attn_logit_softcapping 9");
    with(model("qwen2").number("qwen2.rope.scaling.attn_factor", 1.5), "qwen2.rope.scaling.attn_factor 1.5");
    with(model("gemma2").size("gemma2.attention.sliding_window_pattern", 3), "sliding_window_pattern 3");
    with(model("phi3").text("phi3.rope.scaling.type", "longrope"), "without rope_factors_long.weight");
    with(model("phi3").floats("rope_factors_long.weight", &[2], 1.0), "one is missing");
    with(
        model("phi3").floats("rope_factors_long.weight", &[3], 1.0),
        "rope_factors_long.weight has shape [3]",
    );
    with(model("gemma2").tensor("blk.0.ffn_norm.weight", &[32], 8, &[0; 34]), "not that of a norm");
    with(model("llama").number("llama.logit_scale", 0.5), "llama.logit_scale 0.5");
    with(model("llama").size("llama.attention.sliding_window", 32), "llama.attention.sliding_window 32");
    with(model("qwen3").flag("qwen3.attention.causal", false), "qwen3.attention.causal false");
    with(model("llama").text("llama.rope.scaling.type", "longrope"), "rope scaling longrope");
    with(model("llama").size("llama.rope.dimension_count", 2), "llama.rope.dimension_count 2");
    with(model("llama").floats("rope_freqs.weight", &[2], 7.0), "rope_freqs.weight");
    with(model("llama").floats("blk.0.ffn_gate_exps.weight", &[8], 0.0), "blk.0.ffn_gate_exps.weight");
    with(model("llama").floats("blk.00.attn_k.weight", &[8], 0.0), "blk.00.attn_k.weight");
    with(model("llama").floats("blk.0.attn_q_norm.weight", &[4], 0.0), "blk.0.attn_q_norm.weight");
    with(model("llama").tensor("blk.0.attn_k.weight", &[256, 4], 21, &[0; 440]), "type IQ3_S");
    with(model("llama").tensor("blk.0.attn_k.weight", &[8, 4], 77, &[]), "type number 77");
    // An effect-free value is no obstacle.
    for allowed in [
        model("llama").size("llama.expert_count", 0),
        model("llama").flag("llama.attention.causal", true),
        model("qwen3").floats("blk.0.attn_q_norm.weight", &[4], 0.0),
    ] {
        opened(&allowed).expect("nothing to refuse");
    }

    let mut unknown = model("llama").file();
    unknown[4] = 1;
    let error = GgufFiles::from_bytes("m.gguf", &unknown).expect_err("version 1").to_string();
    assert!(error.contains("version 1"), "{error}");
    unknown[4..8].copy_from_slice(&3_u32.to_be_bytes());
    let error = GgufFiles::from_bytes("m.gguf", &unknown).expect_err("big-endian").to_string();
    assert!(error.contains("big-endian"), "{error}");
    assert!(GgufFiles::from_bytes("m.gguf", b"{}").is_err());
}

#[test]
fn an_unknown_tokenizer_is_refused_by_name() {
    let named = |model: &str, pre: Option<&str>| {
        let mut sketch = GgufSketch::default()
            .text("tokenizer.ggml.model", model)
            .texts("tokenizer.ggml.tokens", &["a", "b", "ab"])
            .texts("tokenizer.ggml.merges", &["a b"]);
        if let Some(pre) = pre {
            sketch = sketch.text("tokenizer.ggml.pre", pre);
        }
        let file = sketch.file();
        let header = GgufHeader::read("m.gguf", &file).expect("a header");
        Vocabulary::read(&header).map(|_| ()).map_err(|error| error.to_string())
    };
    assert!(named("rwkv", None).expect_err("another kind").contains("rwkv"));
    assert!(named("gpt2", None).expect_err("no name").contains("tokenizer.ggml.pre"));
    assert!(named("gpt2", Some("viking")).expect_err("another name").contains("viking"));
    assert_eq!(named("gpt2", Some("llama-bpe")), Ok(()));
}

#[test]
fn a_vocabulary_that_contradicts_itself_is_refused() {
    let tokens = |tokens: &[&str], merges: &[&str], kinds: &[i32]| {
        let sketch = GgufSketch::default()
            .text("tokenizer.ggml.model", "gpt2")
            .text("tokenizer.ggml.pre", "default")
            .texts("tokenizer.ggml.tokens", tokens)
            .wholes("tokenizer.ggml.token_type", kinds)
            .texts("tokenizer.ggml.merges", merges)
            .size("tokenizer.ggml.padding_token_id", 2);
        let file = sketch.file();
        let header = GgufHeader::read("m.gguf", &file).expect("a header");
        let vocabulary = Vocabulary::read(&header).map_err(|error| error.to_string())?;
        vocabulary.tokenizer().map_err(|error| error.to_string())?;
        vocabulary.config().map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(tokens(&["a", "b", "ab"], &["a b"], &[1, 1, 1]), Ok(()));
    for (result, words) in [
        (tokens(&["a", "b", "a"], &[], &[1, 1, 1]), "twice"),
        (tokens(&["a", "b", "ab"], &["a c"], &[1, 1, 1]), "a c"),
        (tokens(&["a", "b", "ab"], &["ab"], &[1, 1, 1]), "ab"),
        (tokens(&["a", "b", "ab"], &["a b"], &[1, 1]), "token types"),
        (tokens(&["a", "b"], &[], &[1, 1]), "padding_token_id 2"),
    ] {
        let error = result.expect_err(words);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn merges_of_sentencepiece_are_bounded_by_the_tokens() {
    // A run of n letters has n - 1 divisions, and all parts are tokens.
    let merges = |longest: usize| {
        let runs: Vec<String> = (1..=longest).map(|len| "a".repeat(len)).collect();
        let sketch = GgufSketch::default()
            .text("tokenizer.ggml.model", "llama")
            .texts("tokenizer.ggml.tokens", &runs.iter().map(String::as_str).collect::<Vec<_>>())
            .wholes("tokenizer.ggml.scores", &vec![0; longest]);
        let file = sketch.file();
        let header = GgufHeader::read("m.gguf", &file).expect("a header");
        let tokenizer = Vocabulary::read(&header).expect("a vocabulary").tokenizer();
        tokenizer.map(|found| found["model"]["merges"].as_array().map_or(0, Vec::len))
    };
    // The unknown token is the first one. Divisions on average: half of the longest run.
    assert_eq!(merges(129).expect("64 on average"), 64 * 129);
    let error = merges(130).expect_err("more than 64 on average").to_string();
    assert!(error.contains("130 tokens have more than 64 merges"), "{error}");
}

#[test]
fn false_counts_lengths_and_offsets_are_refused_before_anything_is_allocated() {
    let base = metadata("llama");
    refused(&base.clone().described("x", &[8], 0, 0), "ends after the file");
    refused(&base.clone().described("x", &[8], 0, 16).bytes(&[0; 64]), "multiple of 32");
    refused(&base.clone().described("x", &[u64::MAX, 2], 0, 0), "too large");
    refused(&base.clone().described("x", &[1 << 40, 1 << 40], 8, 0), "too large");
    refused(&base.clone().described("x", &[4], 8, 0), "whole blocks");
    refused(&base.clone().described("x", &[0], 0, 0), "whole blocks");
    refused(&base.clone().described("x", &[1, 1, 1, 1, 1], 0, 0), "5 dimensions");
    refused(&base.clone().described("x", &[], 0, 0), "0 dimensions");
    refused(&base.clone().described(&"x".repeat(300), &[8], 0, 0), "300 bytes");
    refused(&base.clone().floats("x", &[8], 0.0).floats("x", &[8], 0.0), "x appears twice");
    refused(&base.clone().size("llama.block_count", 2), "llama.block_count appears twice");
    refused(&base.clone().size("general.alignment", 24), "general.alignment 24");
    refused(&model("llama").text("llama.rope.freq_base", "x"), "llama.rope.freq_base is not");
    refused(&model("llama").number("llama.rope.freq_base", f32::NAN), "llama.rope.freq_base is not");

    let counted = |tensors: u64, values: u64, rest: &[u8]| {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend(tensors.to_le_bytes());
        file.extend(values.to_le_bytes());
        file.extend(rest);
        GgufFiles::from_bytes("m.gguf", &file).expect_err("refused").to_string()
    };
    assert!(counted(u64::MAX, 0, &[]).contains("tensors"));
    assert!(counted(0, u64::MAX, &[]).contains("values"));
    assert!(counted(1 << 18, 0, &[]).contains("ends within its header"));
    let mut array = Vec::new();
    push_text(&mut array, "k");
    array.extend(9_u32.to_le_bytes());
    for (kind, words) in
        [(4_u32, "elements"), (8, "ends within its header"), (9, "unknown type"), (99, "unknown type")]
    {
        let mut array = array.clone();
        array.extend(kind.to_le_bytes());
        array.extend((u64::MAX / 2).to_le_bytes());
        let error = counted(0, 1, &array);
        assert!(error.contains(words), "{kind}: {error}");
    }
}

#[test]
fn no_prefix_and_no_changed_byte_of_a_file_ends_the_process() {
    let whole = contents("qwen2-gguf/model.gguf");
    let header = GgufHeader::read("m.gguf", &whole).expect("a header");
    let first = header.tensors().iter().map(|tensor| tensor.start).min().expect("tensors");
    let read = |bytes: &[u8]| {
        let files = GgufFiles::from_bytes("m.gguf", bytes)?;
        for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            files.read(name)?;
        }
        files.entries()
    };
    assert!(read(&whole).is_ok());
    for end in (0..first).step_by(61) {
        assert!(read(&whole[..end]).is_err(), "{end}");
    }
    // A fixed sequence of changed bytes, in places all over the header.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..300 {
        let mut changed = whole.clone();
        for _ in 0..2 {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            changed[(state >> 33) as usize % first] = (state >> 24) as u8;
        }
        let _either = read(&changed);
    }
}

#[test]
fn a_divided_model_is_opened_by_its_first_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |number: u32| folder.path().join(format!("big-{number:05}-of-00002.gguf"));
    let first = metadata("qwen3").size("split.count", 2).floats("token_embd.weight", &[8, 4], 0.0);
    let second = GgufSketch::default().floats("output.weight", &[8, 4], 500.0);
    std::fs::write(path(1), first.file()).expect("written");
    let error = GgufFiles::open(&path(1)).expect_err("half of the model");
    assert!(matches!(&error, ModelError::Missing(name) if name == "big-00002-of-00002.gguf"), "{error}");
    std::fs::write(path(2), second.size("split.count", 2).file()).expect("written");

    let files = ModelFiles::at(folder.path()).expect("one model");
    assert_eq!(files.default_name(), "big");
    assert!(!ModelConfig::read(&files).expect("a configuration").tied);
    let weights = Weights::open(&files).expect("weights");
    let mut values = [0.0];
    weights.tensor("lm_head.weight", &[4, 8]).expect("in the second file").read_f32(31, &mut values);
    assert_eq!(values, [531.0]);
    let error = ModelFiles::at(&path(2)).expect_err("the second file").to_string();
    assert!(error.contains("-00001-of-00002.gguf"), "{error}");
}

#[test]
fn a_folder_with_several_models_is_refused_and_a_checkpoint_comes_before_them() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["one.gguf", "two.gguf"] {
        std::fs::write(folder.path().join(name), model("llama").file()).expect("written");
    }
    let error = ModelFiles::at(folder.path()).expect_err("two models").to_string();
    assert!(error.contains("2 GGUF models"), "{error}");
    assert_eq!(ModelFiles::at(&folder.path().join("two.gguf")).expect("named").default_name(), "two");
    std::fs::write(folder.path().join("config.json"), "{}").expect("written");
    assert!(matches!(ModelFiles::at(folder.path()), Ok(ModelFiles::Dir(_))));
}

#[test]
fn another_file_is_another_model() {
    let identity_of = |sketch: &GgufSketch| {
        let files = ModelFiles::Gguf(std::sync::Arc::new(opened(sketch).expect("a model")));
        identity(&files).expect("an identity")
    };
    let one = identity_of(&model("llama"));
    assert_eq!(one, identity_of(&model("llama")));
    assert_ne!(one, identity_of(&model("llama").number("llama.rope.freq_base", 5e5)));
    assert_ne!(one, identity_of(&metadata("llama").floats("token_embd.weight", &[8, 4], 1.0)));

    // A header that is longer than what is always read. Samples of 4 MiB are 8 KiB apart and of 4 KiB.
    let with_text = |text: &str| {
        let long = model("llama").text("general.description", text);
        identity_of(&long.tensor("output.weight", &[8, 131_072], 0, &vec![0; 4 << 20]))
    };
    let text = "x".repeat(300_000);
    let base = with_text(&text);
    for at in [100_000, 102_000, 104_000, 106_000] {
        let changed = format!("{}y{}", &text[..at], &text[at + 1..]);
        assert_ne!(base, with_text(&changed), "{at}");
    }
}

#[test]
fn the_page_on_checkpoints_lists_every_type_and_every_division() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/checkpoints.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let lists = [GgmlType::SUPPORTED.to_owned(), pre_tokenizer::PreTokenizer::supported()];
    let names: Vec<&str> = lists.iter().flat_map(|list| list.split([' ', ',']).skip(1)).collect();
    assert!(names.len() > 25);
    for name in names.into_iter().filter(|name| !name.is_empty()) {
        assert!(page.contains(&format!("`{name}`")), "{name}");
    }
}
