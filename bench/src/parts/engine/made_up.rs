//! The generated model as a checkpoint folder, for engines that are started as a process.
//!
//! The weights are those that are measured without a checkpoint. The tokenizer is the built-in model's, which is
//! sufficient for prompts of token ids.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use baton_engine::model::config::ModelConfig;
use baton_engine::model::weights::Weights;
use serde_json::{Map, json};

use super::EngineBenchError;

/// The files of the built-in model's tokenizer.
const TOKENIZER: [(&str, &[u8]); 2] = [
    ("tokenizer.json", include_bytes!("../../../../engine/models/demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../../engine/models/demo/tokenizer_config.json")),
];

/// Names and shapes of all tensors, in the order of the file.
fn tensors(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, inter) = (config.hidden, config.intermediate);
    let (query, kv) = (config.query_width(), config.kv_width());
    let of_layer = |layer: usize| {
        [
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![query, hidden]),
            ("self_attn.k_proj", vec![kv, hidden]),
            ("self_attn.v_proj", vec![kv, hidden]),
            ("self_attn.o_proj", vec![hidden, query]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![inter, hidden]),
            ("mlp.up_proj", vec![inter, hidden]),
            ("mlp.down_proj", vec![hidden, inter]),
        ]
        .map(|(part, shape)| (format!("model.layers.{layer}.{part}.weight"), shape))
    };
    let first = [("model.embed_tokens.weight".to_owned(), vec![config.vocab, hidden])];
    let last = [
        ("model.norm.weight".to_owned(), vec![hidden]),
        ("lm_head.weight".to_owned(), vec![config.vocab, hidden]),
    ];
    first.into_iter().chain((0..config.layers).flat_map(of_layer)).chain(last).collect()
}

/// Writes a new folder. `text` is the parsed configuration of a model without biases and with its own output matrix.
///
/// # Errors
/// [`EngineBenchError::Report`], also if the folder exists.
pub(in crate::parts) fn write(
    folder: &Path,
    text: &str,
    config: &ModelConfig,
    weights: &Weights,
) -> Result<(), EngineBenchError> {
    fs::create_dir(folder).map_err(|error| {
        let what = format!("--write-model {}: {error}", folder.display());
        io::Error::new(error.kind(), what)
    })?;
    for (name, bytes) in TOKENIZER {
        fs::write(folder.join(name), bytes)?;
    }
    fs::write(folder.join("config.json"), text)?;
    let tensors = tensors(config);
    let (mut header, mut at) = (Map::new(), 0);
    for (name, shape) in &tensors {
        let end = at + 2 * shape.iter().product::<usize>();
        header.insert(name.clone(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let header = json!(header).to_string();
    let mut file = BufWriter::new(File::create(folder.join("model.safetensors"))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for (name, shape) in &tensors {
        let tensor = weights.tensor(name, shape)?;
        file.write_all(tensor.bf16_bytes(0, shape.iter().product()))?;
    }
    file.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use baton_engine::model::ModelFiles;
    use baton_engine::model::generation::GenerationDefaults;

    use super::*;

    #[test]
    fn the_written_model_matches_the_random_weights() {
        let text = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
            "vocab_size": 64, "tie_word_embeddings": false}"#;
        let config = ModelConfig::parse(text.as_bytes(), GenerationDefaults::default()).unwrap();
        let (parent, weights) = (tempfile::tempdir().unwrap(), Weights::random(1));
        let folder = parent.path().join("model");
        write(&folder, text, &config, &weights).unwrap();
        let files = ModelFiles::Dir(folder.clone());
        assert_eq!(ModelConfig::read(&files).unwrap().vocab, 64);
        let read = Weights::open(&files).unwrap();
        for (name, shape) in tensors(&config) {
            let count = shape.iter().product();
            let (made, read) = (weights.tensor(&name, &shape).unwrap(), read.tensor(&name, &shape).unwrap());
            assert_eq!(made.bf16_bytes(0, count), read.bf16_bytes(0, count), "{name}");
        }
        assert!(write(&folder, text, &config, &weights).unwrap_err().to_string().contains("--write-model"));
    }
}
