//! A generated checkpoint with four KV heads: the fixtures have two, too few to shard them twice.

use std::fmt::Write;
use std::path::Path;
use std::sync::OnceLock;

/// Shapes are small; the weights are random but the same in every run.
const LAYERS: usize = 2;
const HIDDEN: usize = 64;
const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const HEAD_DIM: usize = 16;
const INTERMEDIATE: usize = 96;
const VOCAB: usize = 512;

/// The folder of the checkpoint, as a model's name for `options`.
pub(crate) fn wide() -> &'static str {
    static MADE: OnceLock<(tempfile::TempDir, String)> = OnceLock::new();
    let (_, path) = MADE.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        make(folder.path());
        let path = folder.path().to_str().expect("UTF-8").to_owned();
        (folder, path)
    });
    path
}

fn make(folder: &Path) {
    let llama = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama3-f32");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(llama.join(file), folder.join(file)).expect("a fixture's tokenizer");
    }
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "intermediate_size": INTERMEDIATE, "vocab_size": VOCAB, "hidden_act": "silu",
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 506,
        "eos_token_id": 507, "tie_word_embeddings": false, "torch_dtype": "float32",
    });
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
    std::fs::write(folder.join("model.safetensors"), weights()).expect("written");
}

fn weights() -> Vec<u8> {
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
        ("lm_head.weight".to_owned(), vec![VOCAB, HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let of_layer = [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.k_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.v_proj", vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HEADS * HEAD_DIM]),
            ("mlp.gate_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.up_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INTERMEDIATE]),
        ];
        tensors.extend(of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    let (mut header, mut data) = (String::from("{"), Vec::new());
    let mut state = 0x9e37_79b9_u32;
    for (name, shape) in &tensors {
        let start = data.len();
        for _ in 0..shape.iter().product::<usize>() {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            let random = f64::from(state) / f64::from(u32::MAX) - 0.5;
            // Norms are near one; matrices keep the magnitude of their input.
            let value = if shape.len() == 1 { 1.0 + random * 0.2 } else { random * 0.5 };
            data.extend((value as f32).to_le_bytes());
        }
        let comma = if header.len() > 1 { "," } else { "" };
        let end = data.len();
        write!(
            header,
            r#"{comma}"{name}":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{start},{end}]}}"#
        )
        .expect("a string takes everything");
    }
    header.push('}');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}
