//! The computation of a checkpoint: `config.json` and `generation_config.json`, parsed into one [`ModelConfig`].
//!
//! Both dialects are supported: that of most hub checkpoints (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of
//! transformers 5 (`rope_parameters`, `dtype`). A feature that would change the computation and is not implemented is
//! refused **by name**, before any weight is read. An engine that ignores unknown fields would generate wrong text.

mod json;
mod rope;

pub use rope::{Rope, RopeScaling};

use baton_connector::KvLayout;
use baton_connector::layout::KvDtype;

use self::json::JsonFields;
use super::quantized::{self, QuantScheme};
use super::{ModelError, ModelFiles};
use crate::model::generation::GenerationDefaults;

/// The file that describes the architecture.
pub(crate) const CONFIG_FILE: &str = "config.json";
/// The supported models, for refusals.
const SUPPORTED: &str = "dense Llama, Qwen2 and Qwen3 decoders";

/// Upper bounds of each size: far above any released checkpoint, and low enough that products of two of them fit
/// `usize` on every platform. A hostile file therefore cannot request terabytes.
const MAX_LAYERS: usize = 1024;
const MAX_WIDTH: usize = 1 << 20;
const MAX_HEADS: usize = 4096;
const MAX_HEAD_DIM: usize = 512;
const MAX_VOCAB: usize = 1 << 22;
const MAX_POSITIONS: usize = 1 << 26;

/// Architecture family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFamily {
    /// `LlamaForCausalLM`.
    Llama,
    /// `Qwen2ForCausalLM`: biases on q, k and v.
    Qwen2,
    /// `Qwen3ForCausalLM`: RMS norm on every head of q and k, explicit `head_dim`.
    Qwen3,
}

/// All properties of a checkpoint that the engine needs, besides its weights and its tokenizer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture family.
    pub family: ModelFamily,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of one head; even.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub intermediate: usize,
    /// Rows of the embedding and of a row of logits; may exceed the tokenizer's ids (padding).
    pub vocab: usize,
    /// Longest sequence in tokens the checkpoint is made for, with its rope scaling.
    pub max_positions: usize,
    /// Added to the mean square in every RMS norm.
    pub norm_eps: f32,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the attention output projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Tokens that end a completion; `generation_config.json` overrides `config.json`. The tokenizer may name another
    /// one: see [`Self::ends_of_text`].
    pub eos: Vec<u32>,
    /// First token of a text, if the checkpoint names one.
    pub bos: Option<u32>,
    /// Default sampling parameters.
    pub generation: GenerationDefaults,
}

impl ModelConfig {
    /// Reads the configuration of a checkpoint.
    ///
    /// # Errors
    /// Returns [`ModelError::Missing`] without `config.json`. Returns [`ModelError::Malformed`] for a field that is
    /// absent, of the wrong type or out of range. Returns [`ModelError::Unsupported`] for an architecture or feature
    /// that this engine does not compute.
    pub fn read(files: &ModelFiles) -> Result<Self, ModelError> {
        let config = files.open(CONFIG_FILE)?.ok_or_else(|| ModelError::Missing(CONFIG_FILE.into()))?;
        Self::parse(&config, GenerationDefaults::load(files)?)
    }

    /// Parses `config.json`. `generation` contains the values of `generation_config.json`, if it exists.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(config: &[u8], generation: GenerationDefaults) -> Result<Self, ModelError> {
        let fields = JsonFields::parse(CONFIG_FILE, config)?;
        let family = family(&fields)?;
        refuse_what_is_not_computed(&fields, family)?;

        let size = |name, max| fields.size(name, max);
        let required = |name, max| size(name, max)?.ok_or_else(|| fields.absent(name));
        let hidden = required("hidden_size", MAX_WIDTH)?;
        let layers = required("num_hidden_layers", MAX_LAYERS)?;
        let heads = required("num_attention_heads", MAX_HEADS)?;
        let kv_heads = size("num_key_value_heads", MAX_HEADS)?.unwrap_or(heads);
        let head_dim = match (size("head_dim", MAX_HEAD_DIM)?, family) {
            (Some(dim), _) => dim,
            // The default of transformers' Qwen3Config, which does not depend on the width.
            (None, ModelFamily::Qwen3) => 128,
            (None, ModelFamily::Llama | ModelFamily::Qwen2) if hidden.is_multiple_of(heads) => hidden / heads,
            (None, _) => {
                return Err(fields.malformed(format!(
                    "hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
                )));
            }
        };
        if !heads.is_multiple_of(kv_heads) {
            return Err(fields.malformed(format!(
                "num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )));
        }
        if !head_dim.is_multiple_of(2) || head_dim > MAX_HEAD_DIM {
            return Err(
                fields.malformed(format!("head_dim {head_dim} must be even and at most {MAX_HEAD_DIM}"))
            );
        }
        let max_positions = size("max_position_embeddings", MAX_POSITIONS)?.unwrap_or(match family {
            ModelFamily::Llama => 2048,
            ModelFamily::Qwen2 | ModelFamily::Qwen3 => 32768,
        });
        let norm_eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
        if !(norm_eps > 0.0 && norm_eps < 1.0) {
            return Err(fields.malformed(format!("rms_norm_eps {norm_eps} is not between 0 and 1")));
        }
        let rope = Rope::parse(&fields, max_positions)?;
        let max_positions = rope.positions(max_positions);
        if !(1..=MAX_POSITIONS).contains(&max_positions) {
            return Err(fields.malformed(format!(
                "rope scaling gives {max_positions} positions, not between 1 and {MAX_POSITIONS}"
            )));
        }
        let attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
        let vocab = required("vocab_size", MAX_VOCAB)?;
        let mut eos = fields.tokens("eos_token_id")?.unwrap_or_default();
        if !generation.eos_token_ids.is_empty() {
            eos.clone_from(&generation.eos_token_ids);
        }
        if let Some(token) = eos.iter().find(|token| **token as usize >= vocab) {
            return Err(
                fields.malformed(format!("eos_token_id {token} is outside the vocabulary of {vocab}"))
            );
        }
        Ok(Self {
            family,
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            intermediate: required("intermediate_size", MAX_WIDTH)?,
            vocab,
            max_positions,
            norm_eps: norm_eps as f32,
            tied: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: family == ModelFamily::Qwen2 || attention_bias,
            output_bias: family != ModelFamily::Qwen2 && attention_bias,
            mlp_bias: family == ModelFamily::Llama && fields.flag("mlp_bias")?.unwrap_or(false),
            rope,
            eos,
            bos: fields.token("bos_token_id")?,
            generation,
        })
    }

    /// Tokens that end a completion, including the one that the tokenizer names. As in vLLM: a checkpoint whose
    /// template ends a turn with `<|im_end|>` often names that token in `tokenizer_config.json` only. A token without a
    /// row of logits cannot be generated and is left out.
    #[must_use]
    pub fn ends_of_text(&self, tokenizer_eos: Option<u32>) -> Vec<u32> {
        let known = |token: &u32| (*token as usize) < self.vocab && !self.eos.contains(token);
        self.eos.iter().copied().chain(tokenizer_eos.filter(known)).collect()
    }

    /// Whether q and k are normalized head by head.
    #[must_use]
    pub fn qk_norm(&self) -> bool {
        self.family == ModelFamily::Qwen3
    }

    /// Width of all query heads together.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key heads together, which equals that of the value heads.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The shape of a KV block of `block_tokens` tokens, over all heads.
    #[must_use]
    pub fn kv_layout(&self, block_tokens: usize, dtype: KvDtype) -> KvLayout {
        let Self { layers, kv_heads, head_dim, .. } = *self;
        KvLayout { layers, kv_heads, head_dim, block_tokens, dtype }
    }
}

/// The family, from `architectures` or, without it, from `model_type`.
fn family(fields: &JsonFields<'_>) -> Result<ModelFamily, ModelError> {
    let named = match fields.get("architectures").and_then(|list| list.get(0)) {
        Some(first) => first.as_str(),
        None => fields.text("model_type")?,
    };
    match named {
        Some("LlamaForCausalLM" | "llama") => Ok(ModelFamily::Llama),
        Some("Qwen2ForCausalLM" | "qwen2") => Ok(ModelFamily::Qwen2),
        Some("Qwen3ForCausalLM" | "qwen3") => Ok(ModelFamily::Qwen3),
        Some(other) => Err(fields.unsupported(&format!("architecture {other}"), SUPPORTED)),
        None => Err(fields.malformed("neither architectures nor model_type names an architecture".into())),
    }
}

/// Refuses features that change the result and are not implemented.
fn refuse_what_is_not_computed(fields: &JsonFields<'_>, family: ModelFamily) -> Result<(), ModelError> {
    if let Some(quantization) = fields.get("quantization_config") {
        QuantScheme::parse(quantization).map_err(|what| fields.unsupported(&what, quantized::SUPPORTED))?;
    }
    match fields.text("hidden_act")? {
        None | Some("silu" | "swish") => {}
        Some(other) => return Err(fields.unsupported(&format!("hidden_act {other}"), "silu")),
    }
    for experts in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if fields.size_or_zero(experts)? > 1 {
            return Err(fields.unsupported(experts, SUPPORTED));
        }
    }
    if fields.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(fields.unsupported("partial_rotary_factor", "rotary embedding of whole heads"));
    }
    if fields
        .get("layer_types")
        .and_then(|list| list.as_array())
        .is_some_and(|list| list.iter().any(|layer| layer.as_str() != Some("full_attention")))
    {
        return Err(fields.unsupported("layer_types other than full_attention", "full attention"));
    }
    // As in transformers: the window counts only if `use_sliding_window` is on, and only from layer
    // `max_window_layers`. Llama has no window.
    if family != ModelFamily::Llama && fields.flag("use_sliding_window")?.unwrap_or(false) {
        let windowed_from = fields.size_or_zero("max_window_layers")?;
        if fields.get("sliding_window").is_some()
            && windowed_from < fields.size_or_zero("num_hidden_layers")?
        {
            return Err(fields.unsupported("use_sliding_window", "full attention"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn llama() -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100, "rms_norm_eps": 1e-5,
            "eos_token_id": 7
        })
    }

    fn with(changes: &Value) -> Result<ModelConfig, ModelError> {
        let mut config = llama();
        for (key, value) in changes.as_object().expect("an object") {
            config[key] = value.clone();
        }
        ModelConfig::parse(config.to_string().as_bytes(), GenerationDefaults::default())
    }

    #[test]
    fn absent_fields_take_the_defaults_of_transformers() {
        let config = with(&json!({})).unwrap();
        assert_eq!((config.head_dim, config.kv_heads, config.tied), (16, 4, false));
        assert_eq!((config.rope.theta, config.max_positions), (10_000.0, 2048));
        assert_eq!(config.eos, [7]);
        assert!((config.norm_eps - 1e-5).abs() < 1e-12);
        let qwen3 = with(&json!({"architectures": ["Qwen3ForCausalLM"]})).unwrap();
        assert_eq!((qwen3.head_dim, qwen3.qk_norm(), qwen3.qkv_bias), (128, true, false));
    }

    #[test]
    fn both_dialects_mean_the_same() {
        let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        let mut parameters = scaling.clone();
        parameters["rope_theta"] = json!(5e5);
        let legacy = with(&json!({"rope_theta": 5e5, "rope_scaling": scaling})).unwrap();
        let current = with(&json!({"rope_parameters": parameters})).unwrap();
        assert_eq!(legacy, current);
        assert!(matches!(legacy.rope.scaling, RopeScaling::Llama3 { .. }));
    }

    #[test]
    fn the_eos_list_of_the_generation_config_wins() {
        let generation = GenerationDefaults { eos_token_ids: vec![1, 2], ..GenerationDefaults::default() };
        let config = ModelConfig::parse(llama().to_string().as_bytes(), generation).unwrap();
        assert_eq!(config.eos, [1, 2]);
    }

    #[test]
    fn the_tokenizers_end_of_text_is_one_beside_those_of_the_configuration() {
        let config = with(&json!({})).unwrap();
        assert_eq!(config.ends_of_text(Some(3)), [7, 3]);
        assert_eq!(config.ends_of_text(Some(7)), [7]);
        assert_eq!(config.ends_of_text(None), [7]);
        // Row 100 does not exist.
        assert_eq!(config.ends_of_text(Some(100)), [7]);
        assert_eq!(with(&json!({"eos_token_id": null})).unwrap().ends_of_text(None), [0_u32; 0]);
    }

    #[test]
    fn rope_scaling_stretches_the_context_as_in_vllm() {
        let positions = |scaling: Value| {
            with(&json!({"max_position_embeddings": 100, "rope_scaling": scaling})).unwrap().max_positions
        };
        let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        assert_eq!(positions(yarn), 256);
        assert_eq!(positions(json!({"type": "yarn", "factor": 2.5})), 250);
        assert_eq!(positions(json!({"type": "linear", "factor": 2.0})), 200);
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
        assert_eq!(positions(llama3), 100);
        assert_eq!(positions(json!(null)), 100);
        let error = with(&json!({"rope_scaling": {"type": "yarn", "factor": 1e9}})).unwrap_err();
        assert!(error.to_string().contains("positions"), "{error}");
    }

    #[test]
    fn unsupported_model_features_are_refused_by_name() {
        for (change, name) in [
            (json!({"architectures": ["MixtralForCausalLM"]}), "MixtralForCausalLM"),
            (json!({"quantization_config": {"quant_method": "bitsandbytes"}}), "bitsandbytes"),
            (json!({"quantization_config": {"quant_method": "awq", "bits": 8, "group_size": 128}}), "bits 8"),
            (json!({"hidden_act": "gelu"}), "gelu"),
            (json!({"num_local_experts": 8}), "num_local_experts"),
            (json!({"rope_scaling": {"type": "longrope", "factor": 2.0}}), "longrope"),
            (json!({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}), "per layer type"),
            (
                json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true,
                    "sliding_window": 128, "max_window_layers": 1}),
                "use_sliding_window",
            ),
        ] {
            let error = with(&change).unwrap_err();
            assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn an_unused_sliding_window_is_no_obstacle() {
        let unused = json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": false,
            "sliding_window": 4096, "max_window_layers": 2});
        assert!(with(&unused).is_ok());
    }

    #[test]
    fn nonsense_sizes_are_named() {
        for (change, words) in [
            (json!({"hidden_size": 0}), "hidden_size 0"),
            (json!({"hidden_size": -3}), "hidden_size"),
            (json!({"hidden_size": 66}), "not a multiple"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads 3"),
            (json!({"vocab_size": 1_u64 << 40}), "vocab_size"),
            (json!({"head_dim": 33}), "head_dim 33"),
            (json!({"rms_norm_eps": "x"}), "rms_norm_eps"),
            (json!({"eos_token_id": 100}), "eos_token_id 100"),
        ] {
            let error = with(&change).unwrap_err();
            assert!(matches!(error, ModelError::Malformed { .. }), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
