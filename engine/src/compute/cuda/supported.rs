//! What the kernels of a device do not compute. It is refused by name before any weight is read.

use super::device::Element;
use super::kernels;
use crate::model::config::ModelConfig;
use crate::model::spec::Activation;

/// Whether the kernels compute the model.
///
/// # Errors
/// The first feature that they do not compute.
pub(super) fn computed(config: &ModelConfig, element: Element) -> Result<(), String> {
    kernels::supported(element, config.head_dim)?;
    let (attention, names) = (&config.attention, &config.spec.tensors);
    let plain_factor = 1.0 / (config.head_dim as f32).sqrt();
    let missing = [
        (config.mlp.experts.is_some(), "experts"),
        (attention.windows.iter().any(Option::is_some), "sliding windows"),
        (attention.cap.is_some(), "soft caps of attention scores"),
        (config.logit_cap.is_some(), "soft caps of logits"),
        (config.mlp.activation != Activation::Silu, "activations other than silu"),
        (
            names.attention_post_norm.is_some() || names.mlp_post_norm.is_some(),
            "norms of a sublayer's output",
        ),
        (config.spec.norm_offset != 0.0, "norm weights with an offset"),
        (config.embedding_scale().is_some(), "scaled embeddings"),
        (attention.local_rope.is_some(), "a rope of its own for some layers"),
        (attention.rotary_dim != config.head_dim, "rotary embedding of a part of each head"),
        (attention.factor != plain_factor, "a scale of queries of its own"),
    ];
    match missing.into_iter().find(|(has, _)| *has) {
        Some((_, what)) => {
            Err(format!("{} has {what}, which only --device cpu computes", config.spec.architecture))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::generation::GenerationDefaults;

    fn result(architecture: &str, changes: &Value) -> Result<(), String> {
        let mut config = json!({
            "architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100
        });
        for (key, value) in changes.as_object().expect("an object") {
            config[key] = value.clone();
        }
        let config = ModelConfig::parse(config.to_string().as_bytes(), GenerationDefaults::default());
        computed(&config.expect("a sound configuration"), Element::F32)
    }

    #[test]
    fn what_the_kernels_do_not_compute_is_refused_by_name() {
        for (architecture, changes, words) in [
            ("MixtralForCausalLM", json!({}), "experts"),
            ("Qwen3MoeForCausalLM", json!({}), "experts"),
            ("MistralForCausalLM", json!({"sliding_window": 64}), "sliding windows"),
            ("Gemma2ForCausalLM", json!({}), "sliding windows"),
            ("Gemma2ForCausalLM", json!({"sliding_window": null}), "soft caps of attention scores"),
            (
                "Gemma2ForCausalLM",
                json!({"sliding_window": null, "attn_logit_softcapping": null}),
                "soft caps of logits",
            ),
            ("Gemma3ForCausalLM", json!({"sliding_window": null}), "activations"),
            (
                "Gemma3ForCausalLM",
                json!({"sliding_window": null, "hidden_activation": "silu"}),
                "norms of a sublayer's output",
            ),
            ("LlamaForCausalLM", json!({"hidden_act": "gelu_pytorch_tanh"}), "activations"),
            ("Phi3ForCausalLM", json!({"partial_rotary_factor": 0.75}), "a part of each head"),
            ("LlamaForCausalLM", json!({"head_dim": 258}), "head_dim 258"),
        ] {
            let error = result(architecture, &changes).unwrap_err();
            assert!(error.contains(words), "{architecture} {changes}: {error}");
        }
    }

    #[test]
    fn families_with_the_features_of_llama_are_computed() {
        for (architecture, changes) in [
            ("LlamaForCausalLM", json!({})),
            ("Qwen2ForCausalLM", json!({})),
            ("Qwen3ForCausalLM", json!({})),
            ("MistralForCausalLM", json!({"sliding_window": null})),
            ("Phi3ForCausalLM", json!({})),
            // Phi-3 with a long context: the window is longer.
            ("Phi3ForCausalLM", json!({"sliding_window": 262_144, "max_position_embeddings": 131_072})),
        ] {
            assert_eq!(result(architecture, &changes), Ok(()), "{architecture}");
        }
    }
}
