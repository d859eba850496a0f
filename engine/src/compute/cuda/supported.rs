//! What the kernels of a device do not compute. It is refused by name before any weight is read.

use super::device::Element;
use super::kernels::{self, CHOSEN_MAX, EXPERTS_MAX};
use crate::model::config::ModelConfig;

/// Rows of experts' matrices in bf16 are read in pieces of this number of elements, 16 bytes.
const ROW_PIECE: usize = 8;

/// Whether the kernels compute the model.
///
/// # Errors
/// The first feature that they do not compute.
pub(super) fn computed(config: &ModelConfig, element: Element) -> Result<(), String> {
    kernels::supported(element, config.head_dim)?;
    let refused = |what: String| {
        Err(format!("{} has {what}, which only --device cpu computes", config.spec.architecture))
    };
    if config.spec.scales.sinks.is_some() {
        return refused("attention sinks".to_owned());
    }
    let Some(experts) = &config.mlp.experts else { return Ok(()) };
    if experts.count > EXPERTS_MAX || experts.per_token > CHOSEN_MAX {
        return refused(format!("{} experts, {} of them for a token", experts.count, experts.per_token));
    }
    let mut widths = [config.hidden, experts.intermediate].into_iter();
    match widths.find(|width| element == Element::Bf16 && !width.is_multiple_of(ROW_PIECE)) {
        Some(width) => refused(format!("experts of width {width}, in bf16 no multiple of {ROW_PIECE}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::generation::GenerationDefaults;

    fn result(architecture: &str, changes: &Value, element: Element) -> Result<(), String> {
        let mut config = json!({
            "architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100
        });
        for (key, value) in changes.as_object().expect("an object") {
            config[key] = value.clone();
        }
        let config = ModelConfig::parse(config.to_string().as_bytes(), GenerationDefaults::default());
        computed(&config.expect("a sound configuration"), element)
    }

    #[test]
    fn what_the_kernels_do_not_compute_is_refused_by_name() {
        let bf16 = Element::Bf16;
        for (architecture, changes, element, words) in [
            ("LlamaForCausalLM", json!({"head_dim": 258}), Element::F32, "head_dim 258"),
            ("LlamaForCausalLM", json!({"head_dim": 24}), bf16, "head_dim 24"),
            ("Gemma2ForCausalLM", json!({"head_dim": 272}), bf16, "head_dim 272"),
            ("GptOssForCausalLM", json!({}), bf16, "attention sinks"),
            ("MixtralForCausalLM", json!({"intermediate_size": 100}), bf16, "experts of width 100"),
            ("Qwen3MoeForCausalLM", json!({"moe_intermediate_size": 4}), bf16, "experts of width 4"),
        ] {
            let error = result(architecture, &changes, element).unwrap_err();
            assert!(error.contains(words), "{architecture} {changes}: {error}");
        }
    }

    #[test]
    fn every_family_is_computed_with_its_features() {
        for (architecture, changes) in [
            ("LlamaForCausalLM", json!({})),
            ("LlamaForCausalLM", json!({"hidden_act": "gelu_pytorch_tanh"})),
            ("Qwen2ForCausalLM", json!({})),
            ("Qwen3ForCausalLM", json!({"use_sliding_window": true, "max_window_layers": 1})),
            ("Qwen3MoeForCausalLM", json!({})),
            ("MistralForCausalLM", json!({"sliding_window": 64})),
            ("MixtralForCausalLM", json!({})),
            ("Phi3ForCausalLM", json!({"partial_rotary_factor": 0.75})),
            ("Gemma2ForCausalLM", json!({"head_dim": 256})),
            ("Gemma3ForCausalLM", json!({"head_dim": 256})),
        ] {
            for element in [Element::F32, Element::Bf16] {
                assert_eq!(result(architecture, &changes, element), Ok(()), "{architecture}");
            }
        }
    }
}
