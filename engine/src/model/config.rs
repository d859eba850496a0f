//! The computation of a checkpoint: `config.json` and `generation_config.json`, parsed into one [`ModelConfig`].
//!
//! Both dialects are supported: that of most hub checkpoints (`rope_theta`, `rope_scaling`, `torch_dtype`) and that of
//! transformers 5 (`rope_parameters`, `dtype`). A feature that would change the computation and is not implemented is
//! refused **by name**, before any weight is read. An engine that ignores unknown fields would generate wrong text.

mod attention;
mod json;
mod mlp;
mod rope;

pub use attention::AttentionConfig;
pub use mlp::{ExpertConfig, MlpConfig};
pub use rope::{Rope, RopeScaling};

use baton_connector::KvLayout;
use baton_connector::layout::KvDtype;

use self::attention::soft_cap;
use self::json::JsonFields;
use super::quantized::{self, QuantScheme};
use super::{ModelError, ModelFiles};
use crate::model::generation::GenerationDefaults;
use crate::model::spec::{MAX_LAYERS, ModelSpec, RopeStretch};

/// The file that describes the architecture.
pub(crate) const CONFIG_FILE: &str = "config.json";
/// The supported models, for refusals.
const SUPPORTED: &str =
    "Llama, Qwen2, Qwen3, Qwen3-MoE, Mistral, Mixtral, Phi-3, Gemma 2, text of Gemma 3, gpt-oss";

/// Upper bounds of each size, beside [`MAX_LAYERS`]: far above any released checkpoint, and low enough that products of two of them fit
/// `usize` on every platform. A hostile file therefore cannot request terabytes.
const MAX_WIDTH: usize = 1 << 20;
const MAX_HEADS: usize = 4096;
const MAX_HEAD_DIM: usize = 512;
const MAX_VOCAB: usize = 1 << 22;
const MAX_POSITIONS: usize = 1 << 26;

/// Which projections have biases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// q, k and v.
    pub qkv: bool,
    /// The attention output projection.
    pub output: bool,
    /// The feed-forward projections.
    pub mlp: bool,
}

/// All properties of a checkpoint that the engine needs, besides its weights and its tokenizer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Architecture family.
    pub spec: &'static ModelSpec,
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
    /// Width of the feed-forward layers without experts.
    pub intermediate: usize,
    /// Rows of the embedding and of a row of logits; may exceed the tokenizer's ids (padding).
    pub vocab: usize,
    /// Longest sequence in tokens the checkpoint is made for, with its rope scaling.
    pub max_positions: usize,
    /// Added to the mean square in every RMS norm.
    pub norm_eps: f32,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
    /// Biases of projections.
    pub biases: Biases,
    /// Attention.
    pub attention: AttentionConfig,
    /// Feed-forward layers.
    pub mlp: MlpConfig,
    /// Soft cap of logits.
    pub logit_cap: Option<f32>,
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
        let whole = JsonFields::parse(CONFIG_FILE, config)?;
        let spec = family(&whole)?;
        refuse_quantization(&whole)?;
        let fields = text_part(&whole, spec)?;
        let size = |name, max| fields.size(name, max);
        let required = |name, max| size(name, max)?.ok_or_else(|| fields.absent(name));
        let layers = required("num_hidden_layers", MAX_LAYERS)?;
        let heads = HeadSizes::parse(&fields, spec)?;
        let declared = size("max_position_embeddings", MAX_POSITIONS)?.unwrap_or(spec.defaults.positions);
        let norm_eps = fields.number("rms_norm_eps")?.unwrap_or(spec.defaults.norm_eps);
        if !(norm_eps > 0.0 && norm_eps < 1.0) {
            return Err(fields.malformed(format!("rms_norm_eps {norm_eps} is not between 0 and 1")));
        }
        let mut attention = AttentionConfig::parse(&fields, spec, (layers, heads.dim, declared))?;
        let max_positions = match spec.rope.stretch {
            RopeStretch::Positions => attention.rope.positions(declared),
            RopeStretch::Declared | RopeStretch::Long | RopeStretch::Yarn { .. } => declared,
        };
        if !(1..=MAX_POSITIONS).contains(&max_positions) {
            return Err(fields.malformed(format!(
                "rope scaling gives {max_positions} positions, not between 1 and {MAX_POSITIONS}"
            )));
        }
        attention.fit_windows(max_positions);
        let vocab = size("vocab_size", MAX_VOCAB)?.or(spec.defaults.vocab);
        let vocab = vocab.ok_or_else(|| fields.absent("vocab_size"))?;
        let tied = fields.flag("tie_word_embeddings")?.or(whole.flag("tie_word_embeddings")?);
        Ok(Self {
            spec,
            hidden: heads.hidden,
            layers,
            heads: heads.query,
            kv_heads: heads.kv,
            head_dim: heads.dim,
            intermediate: required("intermediate_size", MAX_WIDTH)?,
            vocab,
            max_positions,
            norm_eps: norm_eps as f32,
            tied: tied.unwrap_or(spec.defaults.tied),
            biases: Biases {
                qkv: fields.follows(spec.biases.qkv)?,
                output: fields.follows(spec.biases.output)?,
                mlp: fields.follows(spec.biases.mlp)?,
            },
            attention,
            mlp: MlpConfig::parse(&fields, spec, layers)?,
            logit_cap: soft_cap(&fields, "final_logit_softcapping", spec.scales.logit_cap)?,
            eos: ends([&whole, &fields], &generation, vocab)?,
            bos: whole.token("bos_token_id")?.or(fields.token("bos_token_id")?),
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

    /// The same computation for an engine whose sequences have at most this number of positions.
    #[must_use]
    pub fn for_positions(mut self, positions: usize) -> Self {
        self.attention.rope.choose_for(positions);
        self.attention.fit_windows(positions);
        self
    }

    /// The suffix of a checkpoint's identity for a choice of [`Self::for_positions`]: keys that are rotated otherwise
    /// belong to another model.
    #[must_use]
    pub fn identity(&self) -> &'static str {
        if self.attention.rope.is_short() { "+short" } else { "" }
    }

    /// The experts of layer `layer`, if it has any.
    #[must_use]
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertConfig> {
        let is_dense = |experts: &&ExpertConfig| experts.dense.get(layer).copied().unwrap_or(false);
        self.mlp.experts.as_ref().filter(|experts| !is_dense(experts))
    }

    /// Multiplier of embeddings, before it is rounded to the type of the stored ones.
    #[must_use]
    pub fn embedding_scale(&self) -> Option<f32> {
        self.spec.scales.embedding.then(|| (self.hidden as f64).sqrt() as f32)
    }

    /// Weights of the feed-forward layer `layer`.
    #[must_use]
    pub fn mlp_parameters(&self, layer: usize) -> usize {
        let dense = 3 * self.hidden * self.intermediate;
        self.experts_of(layer).map_or(dense, |experts| experts.parameters(self.hidden))
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

/// Widths and heads.
struct HeadSizes {
    hidden: usize,
    query: usize,
    kv: usize,
    dim: usize,
}

impl HeadSizes {
    fn parse(fields: &JsonFields<'_>, spec: &ModelSpec) -> Result<Self, ModelError> {
        let size = |name, max| fields.size(name, max);
        let hidden = size("hidden_size", MAX_WIDTH)?.ok_or_else(|| fields.absent("hidden_size"))?;
        let query = size("num_attention_heads", MAX_HEADS)?.or(spec.defaults.heads);
        let query = query.ok_or_else(|| fields.absent("num_attention_heads"))?;
        // An explicit null means as many as query heads.
        let default = spec.defaults.kv_heads.filter(|_| !fields.has("num_key_value_heads"));
        let kv = size("num_key_value_heads", MAX_HEADS)?.or(default).unwrap_or(query);
        let dim = match size("head_dim", MAX_HEAD_DIM)?.or(spec.defaults.head_dim) {
            Some(dim) => dim,
            None if hidden.is_multiple_of(query) => hidden / query,
            None => {
                return Err(fields.malformed(format!(
                    "hidden_size {hidden} is not a multiple of num_attention_heads {query}"
                )));
            }
        };
        if !query.is_multiple_of(kv) {
            return Err(fields.malformed(format!(
                "num_attention_heads {query} is not a multiple of num_key_value_heads {kv}"
            )));
        }
        if !dim.is_multiple_of(2) || dim > MAX_HEAD_DIM {
            return Err(fields.malformed(format!("head_dim {dim} must be even and at most {MAX_HEAD_DIM}")));
        }
        Ok(Self { hidden, query, kv, dim })
    }
}

/// The family, from `architectures` or, without it, from `model_type`.
fn family(fields: &JsonFields<'_>) -> Result<&'static ModelSpec, ModelError> {
    let named = match fields.get("architectures").and_then(|list| list.get(0)) {
        Some(first) => first.as_str(),
        None => fields.text("model_type")?,
    };
    let Some(named) = named else {
        return Err(fields.malformed("neither architectures nor model_type names an architecture".into()));
    };
    ModelSpec::named(named).ok_or_else(|| fields.unsupported(&format!("architecture {named}"), SUPPORTED))
}

/// The fields of the text model.
fn text_part<'a>(whole: &JsonFields<'a>, spec: &ModelSpec) -> Result<JsonFields<'a>, ModelError> {
    let Some(part) = spec.text else { return Ok(whole.clone()) };
    let fields = whole.object(part.config)?.ok_or_else(|| whole.absent(part.config))?;
    if let Some(other) = fields.text("model_type")?.filter(|kind| *kind != part.model_type) {
        return Err(fields.unsupported(&format!("model_type {other} of {}", part.config), part.model_type));
    }
    if fields.get("quantization_config").is_some() {
        let what = format!("quantization_config inside {}", part.config);
        return Err(fields.unsupported(&what, "quantization_config of the whole checkpoint"));
    }
    Ok(fields)
}

/// Refuses weights of a format that is not read.
fn refuse_quantization(fields: &JsonFields<'_>) -> Result<(), ModelError> {
    let Some(quantization) = fields.get("quantization_config") else { return Ok(()) };
    QuantScheme::parse(quantization).map_err(|what| fields.unsupported(&what, quantized::SUPPORTED))?;
    Ok(())
}

/// Tokens that end a completion; those of `generation_config.json` have priority.
fn ends(
    [whole, text]: [&JsonFields<'_>; 2],
    generation: &GenerationDefaults,
    vocab: usize,
) -> Result<Vec<u32>, ModelError> {
    let given = whole.tokens("eos_token_id")?.or(text.tokens("eos_token_id")?);
    let mut eos = given.unwrap_or_default();
    if !generation.eos_token_ids.is_empty() {
        eos.clone_from(&generation.eos_token_ids);
    }
    match eos.iter().find(|token| **token as usize >= vocab) {
        Some(token) => {
            Err(whole.malformed(format!("eos_token_id {token} is outside the vocabulary of {vocab}")))
        }
        None => Ok(eos),
    }
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
        assert_eq!((config.attention.rope.theta, config.max_positions), (10_000.0, 2048));
        assert_eq!(config.eos, [7]);
        assert!((config.norm_eps - 1e-5).abs() < 1e-12);
        let qwen3 = with(&json!({"architectures": ["Qwen3ForCausalLM"]})).unwrap();
        assert_eq!((qwen3.head_dim, qwen3.biases), (128, Biases::default()));
        let qwen2 = with(&json!({"architectures": ["Qwen2ForCausalLM"], "attention_bias": true})).unwrap();
        assert_eq!(qwen2.biases, Biases { qkv: true, output: false, mlp: false });
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
        assert!(matches!(legacy.attention.rope.scaling, RopeScaling::Llama3 { .. }));
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
            (json!({"architectures": ["Qwen2MoeForCausalLM"]}), "Qwen2MoeForCausalLM"),
            (json!({"quantization_config": {"quant_method": "bitsandbytes"}}), "bitsandbytes"),
            (json!({"quantization_config": {"quant_method": "awq", "bits": 8, "group_size": 128}}), "bits 8"),
            (json!({"hidden_act": "gelu"}), "gelu"),
            (json!({"num_local_experts": 8}), "num_local_experts"),
            (json!({"rope_scaling": {"type": "longrope", "factor": 2.0}}), "longrope"),
            (json!({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}), "per layer type"),
        ] {
            let error = with(&change).unwrap_err();
            assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn the_text_part_of_a_model_with_images_is_read() {
        // As in google/gemma-3-4b-it, whose other fields have the defaults of transformers.
        let text = json!({"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024});
        let whole = json!({"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
            "text_config": text, "vision_config": {"hidden_size": 1152}});
        let parse =
            |config: &Value| ModelConfig::parse(config.to_string().as_bytes(), GenerationDefaults::default());
        let config = parse(&whole).unwrap();
        assert_eq!((config.heads, config.kv_heads, config.head_dim), (8, 4, 256));
        assert_eq!((config.vocab, config.max_positions, config.tied), (262_208, 131_072, true));
        assert_eq!(config.eos, [1, 106]);
        assert_eq!((config.attention.window(4), config.attention.window(5)), (Some(1024), None));
        let norm = config.layer_tensors(3).mlp_norm;
        assert_eq!(norm, "language_model.model.layers.3.pre_feedforward_layernorm.weight");
        let without = json!({"architectures": ["Mistral3ForConditionalGeneration"]});
        assert!(parse(&without).unwrap_err().to_string().contains("text_config is absent"));
        let other = json!({"architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {"model_type": "ministral3"}});
        assert!(parse(&other).unwrap_err().to_string().contains("ministral3"));
        let mut quantized = whole;
        quantized["text_config"]["quantization_config"] = json!({"quant_method": "fp8"});
        assert!(
            parse(&quantized).unwrap_err().to_string().contains("quantization_config inside text_config")
        );
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
