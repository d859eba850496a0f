//! The GGUF models of the fixtures as Hugging Face folders: values in f32 safetensors, and metadata as files.

use std::fs;
use std::path::{Path, PathBuf};

use baton_engine::model::ModelFiles;
use baton_engine::model::config::ModelConfig;
use baton_engine::model::weights::Weights;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

/// Writes a GGUF fixture as a folder of f32 tensors.
pub(crate) fn unpack(fixture: &str, folder: &Path) {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    let files = ModelFiles::at(&path).expect("a GGUF model");
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        let contents = files.open(name).expect("its metadata is sound").expect("it has every file");
        fs::write(folder.join(name), &*contents).expect("written");
    }
    let config = ModelConfig::read(&files).expect("a configuration");
    let weights = Weights::open(&files).expect("weights");
    let values: Vec<_> = shapes(&config)
        .into_iter()
        .map(|(name, shape)| {
            let mut values = vec![0.0; shape.iter().product()];
            weights.tensor(&name, &shape).expect("a tensor of the model").read_f32(0, &mut values);
            let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = values.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(Dtype::F32, shape.clone(), bytes).expect("its values"))
    });
    let file = safetensors::serialize(views, None).expect("tensors");
    fs::write(folder.join("model.safetensors"), file).expect("written");
}

/// Names and shapes of a Llama's or a Qwen 2's tensors.
fn shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, inner) = (config.hidden, config.intermediate);
    let (query, kv) = (config.query_width(), config.kv_width());
    let mut all = vec![
        ("model.embed_tokens.weight".to_owned(), vec![config.vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    if !config.tied {
        all.push(("lm_head.weight".to_owned(), vec![config.vocab, hidden]));
    }
    for layer in 0..config.layers {
        let mut add = |name: &str, shape: &[usize]| {
            all.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
        };
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
        for (name, width) in [("q_proj", query), ("k_proj", kv), ("v_proj", kv)] {
            add(&format!("self_attn.{name}.weight"), &[width, hidden]);
            if config.biases.qkv {
                add(&format!("self_attn.{name}.bias"), &[width]);
            }
        }
        add("self_attn.o_proj.weight", &[hidden, query]);
        add("mlp.gate_proj.weight", &[inner, hidden]);
        add("mlp.up_proj.weight", &[inner, hidden]);
        add("mlp.down_proj.weight", &[hidden, inner]);
    }
    all
}
