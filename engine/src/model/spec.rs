//! The families of models as data: one [`ModelSpec`] for each.
//!
//! A family is a row of [`FAMILIES`]: tensor names, biases, norms, windows, soft caps, experts, and the defaults of
//! `transformers` for absent fields. `config` combines a row with the fields of `config.json`. `tensors` gives the
//! names and rows of a layer to every device. A new dense family is a row and a golden fixture.

/// One family.
#[derive(Debug, PartialEq)]
pub struct ModelSpec {
    /// Its name in `architectures`.
    pub architecture: &'static str,
    /// Its name in `model_type`.
    pub model_type: &'static str,
    /// Where the text model is, if the checkpoint computes other inputs too.
    pub text: Option<TextPart>,
    /// Names of its tensors.
    pub tensors: TensorNames,
    /// Biases of its projections.
    pub biases: BiasRules,
    /// Added to the stored weights of every norm.
    pub norm_offset: f32,
    /// Scales of queries and embeddings, soft caps, and attention sinks.
    pub scales: ScaleRules,
    /// Attention windows.
    pub windows: WindowRule,
    /// Rotary position embedding.
    pub rope: RopeRule,
    /// Activation of the feed-forward layers.
    pub activation: ActivationRule,
    /// Experts of the feed-forward layers.
    pub experts: Option<ExpertRule>,
    /// Values of absent fields.
    pub defaults: SizeDefaults,
}

/// The text model of a checkpoint that computes other inputs too. Only this part is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextPart {
    /// The object of `config.json` with its fields.
    pub config: &'static str,
    /// The only `model_type` of that object that is computed.
    pub model_type: &'static str,
    /// Prefix of its tensors.
    pub prefix: &'static str,
}

/// Names of the tensors. Those of a layer follow [`LAYERS`] and its number. Suffixes are `.weight` and `.bias`.
#[derive(Debug, PartialEq)]
pub struct TensorNames {
    /// The embedding.
    pub embedding: &'static str,
    /// The norm before the output matrix.
    pub final_norm: &'static str,
    /// The output matrix of untied models.
    pub head: &'static str,
    /// The norm before attention.
    pub attention_norm: &'static str,
    /// Projections of q, k and v: three names, or one of a tensor with the rows of all.
    pub qkv: &'static [&'static str],
    /// Norms of each head of q and k.
    pub qk_norm: Option<[&'static str; 2]>,
    /// The output projection of attention.
    pub output: &'static str,
    /// The norm of attention's output before it is added.
    pub attention_post_norm: Option<&'static str>,
    /// The norm before the feed-forward layer.
    pub mlp_norm: &'static str,
    /// Gate and up: two names, or one of a tensor with the rows of both.
    pub gate_up: &'static [&'static str],
    /// The last projection of the feed-forward layer.
    pub down: &'static str,
    /// The norm of the feed-forward layer's output before it is added.
    pub mlp_post_norm: Option<&'static str>,
}

/// Prefix of the tensors of a layer.
pub const LAYERS: &str = "model.layers";
/// Most layers of a model.
pub(super) const MAX_LAYERS: usize = 1024;

/// When a family has a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagRule {
    /// In no checkpoint.
    Never,
    /// In every checkpoint.
    Always,
    /// If this field is true.
    Field(&'static str),
    /// Unless this field is false.
    Unless(&'static str),
}

/// Which projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BiasRules {
    /// q, k and v.
    pub qkv: FlagRule,
    /// The output projection of attention.
    pub output: FlagRule,
    /// The feed-forward projections.
    pub mlp: FlagRule,
}

/// Scales, soft caps and sinks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaleRules {
    /// The field whose inverse root multiplies scores, and its default. Without it: the width of a head.
    pub query: Option<(&'static str, f64)>,
    /// Whether embeddings are multiplied by the root of the model's width.
    pub embedding: bool,
    /// Soft cap of attention scores: its default if the field is absent. An outer `None`: the family has no cap.
    pub attention_cap: Option<Option<f64>>,
    /// Soft cap of logits, in the same form.
    pub logit_cap: Option<Option<f64>>,
    /// The tensor with a logit of each head of q that joins the softmax over the keys: the head's attention sink.
    pub sinks: Option<&'static str>,
}

/// Which layers have a window, and where its width is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowRule {
    /// No layer.
    Never,
    /// With `use_sliding_window`: the layers that `layer_types` names, otherwise those from `max_window_layers` on.
    FromLayer {
        /// Width if `sliding_window` is absent.
        width: usize,
    },
    /// With `use_sliding_window`: every layer.
    Flagged {
        /// Width if `sliding_window` is absent.
        width: usize,
    },
    /// Every layer, unless `sliding_window` is null. The default counts if the field is absent.
    Whole(Option<usize>),
    /// The layers that `layer_types` names, otherwise all but every n-th.
    AllBut {
        /// n, unless the field names it.
        every: usize,
        /// The field with n, if the family has one.
        field: Option<&'static str>,
        /// Width if the field is absent.
        width: usize,
    },
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeRule {
    /// Base if the field is absent.
    pub theta: f64,
    /// Base of layers with a window, if they have a rope of their own.
    pub local_theta: Option<f64>,
    /// Whether a part of each head may be rotated.
    pub partial: bool,
    /// Stretching for long contexts.
    pub stretch: RopeStretch,
}

/// Meaning of a rope's stretching.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStretch {
    /// It stretches the declared positions.
    Positions,
    /// The declared positions contain it.
    Declared,
    /// As `Declared`, and of one kind only: LongRoPE.
    Long,
    /// As `Declared`. Without a description: YaRN with this factor over so many positions, not truncated.
    Yarn {
        /// Divisor of the long wavelengths.
        factor: u32,
        /// Context length before stretching.
        original_positions: u32,
    },
}

/// An activation of feed-forward layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU, approximated by a hyperbolic tangent.
    GeluTanh,
    /// Of the gate x, at most a limit, and of the other input y, within it: `x * sigmoid(1.702 * x) * (y + 1)`. The
    /// other activations multiply by y. gpt-oss calls it `silu`, and vLLM `swigluoai`.
    SwigluOai,
}

/// Where the activation is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActivationRule {
    /// The field.
    pub field: &'static str,
    /// The activation if it is absent.
    pub default: Activation,
}

/// Experts: their fields and tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRule {
    /// The field with the number of experts, and its default.
    pub count: (&'static str, usize),
    /// Experts of a token if the field is absent.
    pub per_token: usize,
    /// The field with the width of an expert, and its default.
    pub intermediate: (&'static str, usize),
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalized: FlagRule,
    /// Whether fields name layers without experts.
    pub dense_layers: bool,
    /// The matrix of the router.
    pub router: &'static str,
    /// Prefix of an expert's number, or of the tensors of all experts.
    pub prefix: &'static str,
    /// Their matrices.
    pub parts: ExpertParts,
}

/// Names of the matrices of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertParts {
    /// Gate, up and down of each expert.
    Apart([&'static str; 3]),
    /// Two tensors for all experts, `[experts, inputs, outputs]`: gate with up, and down. Gate has the even outputs,
    /// and up the odd ones. Both have biases, and so has the router.
    Fused([&'static str; 2]),
}

/// Values of absent fields.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SizeDefaults {
    /// Heads of q, where the family has a default.
    pub heads: Option<usize>,
    /// Rows of the embedding, where the family has a default.
    pub vocab: Option<usize>,
    /// Width of a head; without it the model's width over its heads.
    pub head_dim: Option<usize>,
    /// Heads of k and v; without it as many as of q.
    pub kv_heads: Option<usize>,
    /// Positions.
    pub positions: usize,
    /// Added to the mean square in every norm.
    pub norm_eps: f64,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
}

/// The names of Llama, which most families share.
const LLAMA_TENSORS: TensorNames = TensorNames {
    embedding: "model.embed_tokens",
    final_norm: "model.norm",
    head: "lm_head",
    attention_norm: "input_layernorm",
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    qk_norm: None,
    output: "self_attn.o_proj",
    attention_post_norm: None,
    mlp_norm: "post_attention_layernorm",
    gate_up: &["mlp.gate_proj", "mlp.up_proj"],
    down: "mlp.down_proj",
    mlp_post_norm: None,
};
const QK_NORM: Option<[&str; 2]> = Some(["self_attn.q_norm", "self_attn.k_norm"]);
const GEMMA2_TENSORS: TensorNames = TensorNames {
    attention_post_norm: Some("post_attention_layernorm"),
    mlp_norm: "pre_feedforward_layernorm",
    mlp_post_norm: Some("post_feedforward_layernorm"),
    ..LLAMA_TENSORS
};

const NO_BIAS: BiasRules = BiasRules { qkv: FlagRule::Never, output: FlagRule::Never, mlp: FlagRule::Never };
const ATTENTION_BIAS: BiasRules = BiasRules {
    qkv: FlagRule::Field("attention_bias"),
    output: FlagRule::Field("attention_bias"),
    mlp: FlagRule::Never,
};
const NO_SCALES: ScaleRules =
    ScaleRules { query: None, embedding: false, attention_cap: None, logit_cap: None, sinks: None };
const PLAIN_ROPE: RopeRule =
    RopeRule { theta: 10_000.0, local_theta: None, partial: false, stretch: RopeStretch::Positions };
const SILU: ActivationRule = ActivationRule { field: "hidden_act", default: Activation::Silu };
const GELU: ActivationRule = ActivationRule { field: "hidden_activation", default: Activation::GeluTanh };
const LLAMA_DEFAULTS: SizeDefaults = SizeDefaults {
    heads: None,
    vocab: None,
    head_dim: None,
    kv_heads: None,
    positions: 2048,
    norm_eps: 1e-6,
    tied: false,
};
const QWEN_DEFAULTS: SizeDefaults = SizeDefaults { positions: 32_768, ..LLAMA_DEFAULTS };
const MISTRAL_DEFAULTS: SizeDefaults =
    SizeDefaults { kv_heads: Some(8), positions: 131_072, ..LLAMA_DEFAULTS };
const GEMMA2_DEFAULTS: SizeDefaults = SizeDefaults {
    heads: Some(8),
    vocab: Some(256_000),
    head_dim: Some(256),
    kv_heads: Some(4),
    positions: 8192,
    norm_eps: 1e-6,
    tied: true,
};

const LLAMA: ModelSpec = ModelSpec {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    text: None,
    tensors: LLAMA_TENSORS,
    biases: BiasRules { mlp: FlagRule::Field("mlp_bias"), ..ATTENTION_BIAS },
    norm_offset: 0.0,
    scales: NO_SCALES,
    windows: WindowRule::Never,
    rope: PLAIN_ROPE,
    activation: SILU,
    experts: None,
    defaults: LLAMA_DEFAULTS,
};
const QWEN2: ModelSpec = ModelSpec {
    architecture: "Qwen2ForCausalLM",
    model_type: "qwen2",
    biases: BiasRules { qkv: FlagRule::Always, ..NO_BIAS },
    windows: WindowRule::FromLayer { width: 4096 },
    defaults: QWEN_DEFAULTS,
    ..LLAMA
};
const QWEN3: ModelSpec = ModelSpec {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    tensors: TensorNames { qk_norm: QK_NORM, ..LLAMA_TENSORS },
    biases: ATTENTION_BIAS,
    windows: WindowRule::FromLayer { width: 4096 },
    // The default of transformers' Qwen3Config, which does not depend on the width.
    defaults: SizeDefaults { head_dim: Some(128), ..QWEN_DEFAULTS },
    ..LLAMA
};
const QWEN3_MOE: ModelSpec = ModelSpec {
    architecture: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    tensors: TensorNames { qk_norm: QK_NORM, ..LLAMA_TENSORS },
    biases: ATTENTION_BIAS,
    windows: WindowRule::Flagged { width: 4096 },
    experts: Some(ExpertRule {
        count: ("num_experts", 128),
        per_token: 8,
        intermediate: ("moe_intermediate_size", 768),
        normalized: FlagRule::Field("norm_topk_prob"),
        dense_layers: true,
        router: "mlp.gate",
        prefix: "mlp.experts",
        parts: ExpertParts::Apart(["gate_proj", "up_proj", "down_proj"]),
    }),
    defaults: SizeDefaults { kv_heads: Some(4), ..QWEN_DEFAULTS },
    ..LLAMA
};
const MISTRAL: ModelSpec = ModelSpec {
    architecture: "MistralForCausalLM",
    model_type: "mistral",
    biases: NO_BIAS,
    windows: WindowRule::Whole(Some(4096)),
    defaults: MISTRAL_DEFAULTS,
    ..LLAMA
};
const MIXTRAL: ModelSpec = ModelSpec {
    architecture: "MixtralForCausalLM",
    model_type: "mixtral",
    biases: NO_BIAS,
    windows: WindowRule::Whole(None),
    rope: RopeRule { theta: 1e6, ..PLAIN_ROPE },
    experts: Some(ExpertRule {
        count: ("num_local_experts", 8),
        per_token: 2,
        intermediate: ("intermediate_size", 14_336),
        normalized: FlagRule::Always,
        dense_layers: false,
        router: "block_sparse_moe.gate",
        prefix: "block_sparse_moe.experts",
        parts: ExpertParts::Apart(["w1", "w3", "w2"]),
    }),
    defaults: SizeDefaults { norm_eps: 1e-5, ..MISTRAL_DEFAULTS },
    ..LLAMA
};
const PHI3: ModelSpec = ModelSpec {
    architecture: "Phi3ForCausalLM",
    model_type: "phi3",
    tensors: TensorNames { qkv: &["self_attn.qkv_proj"], gate_up: &["mlp.gate_up_proj"], ..LLAMA_TENSORS },
    biases: NO_BIAS,
    windows: WindowRule::Whole(None),
    rope: RopeRule { partial: true, stretch: RopeStretch::Long, ..PLAIN_ROPE },
    defaults: SizeDefaults { positions: 4096, norm_eps: 1e-5, ..LLAMA_DEFAULTS },
    ..LLAMA
};
const GEMMA2: ModelSpec = ModelSpec {
    architecture: "Gemma2ForCausalLM",
    model_type: "gemma2",
    tensors: GEMMA2_TENSORS,
    biases: ATTENTION_BIAS,
    norm_offset: 1.0,
    scales: ScaleRules {
        query: Some(("query_pre_attn_scalar", 256.0)),
        embedding: true,
        attention_cap: Some(Some(50.0)),
        logit_cap: Some(Some(30.0)),
        ..NO_SCALES
    },
    windows: WindowRule::AllBut { every: 2, field: None, width: 4096 },
    activation: GELU,
    defaults: GEMMA2_DEFAULTS,
    ..LLAMA
};
const GEMMA3: ModelSpec = ModelSpec {
    architecture: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    tensors: TensorNames { qk_norm: QK_NORM, ..GEMMA2_TENSORS },
    biases: ATTENTION_BIAS,
    norm_offset: 1.0,
    scales: ScaleRules {
        query: Some(("query_pre_attn_scalar", 256.0)),
        embedding: true,
        logit_cap: Some(None),
        ..NO_SCALES
    },
    windows: WindowRule::AllBut { every: 6, field: Some("sliding_window_pattern"), width: 4096 },
    rope: RopeRule {
        theta: 1e6,
        local_theta: Some(10_000.0),
        partial: false,
        stretch: RopeStretch::Declared,
    },
    activation: GELU,
    defaults: SizeDefaults { vocab: Some(262_208), positions: 131_072, ..GEMMA2_DEFAULTS },
    ..LLAMA
};
const GEMMA3_WITH_IMAGES: ModelSpec = ModelSpec {
    architecture: "Gemma3ForConditionalGeneration",
    model_type: "gemma3",
    text: Some(TextPart { config: "text_config", model_type: GEMMA3.model_type, prefix: "language_model." }),
    ..GEMMA3
};
const MISTRAL3_WITH_IMAGES: ModelSpec = ModelSpec {
    architecture: "Mistral3ForConditionalGeneration",
    model_type: "mistral3",
    text: Some(TextPart { config: "text_config", model_type: MISTRAL.model_type, prefix: "language_model." }),
    ..MISTRAL
};

const GPT_OSS: ModelSpec = ModelSpec {
    architecture: "GptOssForCausalLM",
    model_type: "gpt_oss",
    biases: BiasRules {
        qkv: FlagRule::Unless("attention_bias"),
        output: FlagRule::Unless("attention_bias"),
        mlp: FlagRule::Never,
    },
    scales: ScaleRules { sinks: Some("self_attn.sinks"), ..NO_SCALES },
    windows: WindowRule::AllBut { every: 2, field: None, width: 128 },
    rope: RopeRule {
        theta: 150_000.0,
        stretch: RopeStretch::Yarn { factor: 32, original_positions: 4096 },
        ..PLAIN_ROPE
    },
    activation: ActivationRule { field: "hidden_act", default: Activation::SwigluOai },
    experts: Some(ExpertRule {
        count: ("num_local_experts", 128),
        per_token: 4,
        intermediate: ("intermediate_size", 2880),
        // A softmax over the chosen experts is their share of the one over all.
        normalized: FlagRule::Always,
        dense_layers: false,
        router: "mlp.router",
        prefix: "mlp.experts",
        parts: ExpertParts::Fused(["gate_up_proj", "down_proj"]),
    }),
    defaults: SizeDefaults {
        heads: Some(64),
        vocab: Some(201_088),
        head_dim: Some(64),
        kv_heads: Some(8),
        positions: 131_072,
        norm_eps: 1e-5,
        tied: false,
    },
    ..LLAMA
};

/// All families.
pub static FAMILIES: [ModelSpec; 12] = [
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    MISTRAL,
    MISTRAL3_WITH_IMAGES,
    MIXTRAL,
    PHI3,
    GEMMA2,
    GEMMA3,
    GEMMA3_WITH_IMAGES,
    GPT_OSS,
];

impl ModelSpec {
    /// Prefix of all tensors.
    #[must_use]
    pub fn prefix(&self) -> &'static str {
        self.text.map_or("", |part| part.prefix)
    }

    /// The family with this name, as an architecture or as a model type.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        FAMILIES.iter().find(|spec| spec.architecture == name || spec.model_type == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::ModelConfig;
    use crate::model::generation::GenerationDefaults;

    #[test]
    fn each_family_has_a_row_and_two_names() {
        for (at, spec) in FAMILIES.iter().enumerate() {
            assert_eq!(ModelSpec::named(spec.architecture), Some(spec));
            assert_eq!(ModelSpec::named(spec.model_type), Some(spec));
            let mut others = FAMILIES.iter().skip(at + 1);
            assert!(others.all(|other| other.architecture != spec.architecture));
            assert!(matches!(spec.tensors.qkv.len(), 1 | 3), "{}", spec.architecture);
            assert!(matches!(spec.tensors.gate_up.len(), 1 | 2), "{}", spec.architecture);
        }
        assert_eq!(ModelSpec::named("Qwen2MoeForCausalLM"), None);
    }

    const PAGE: &str = include_str!("../../../docs/reference/models.md");

    #[test]
    fn the_page_of_the_models_lists_every_family() {
        let (table, _) = PAGE.split_once("```").expect("an example behind the table");
        let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| `")).skip(1).collect();
        assert_eq!(rows.len(), FAMILIES.len());
        for spec in &FAMILIES {
            let named = format!("| `{}` |", spec.architecture);
            assert!(rows.iter().any(|row| row.starts_with(&named)), "{named}");
        }
    }

    #[test]
    fn the_example_of_the_page_has_windows_in_five_of_six_layers() {
        let (_, example) = PAGE.split_once("```json\n").expect("an example");
        let (example, _) = example.split_once("```").expect("its end");
        let config = ModelConfig::parse(example.as_bytes(), GenerationDefaults::default()).expect("sound");
        assert_eq!(config.spec.architecture, "Gemma3ForCausalLM");
        for layer in 0..26 {
            let window = (layer % 6 != 5).then_some(512);
            assert_eq!(config.attention.window(layer), window, "layer {layer}");
        }
    }
}
