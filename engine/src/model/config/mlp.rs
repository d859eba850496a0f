//! Feed-forward layers of a checkpoint: the activation and the experts.

use super::json::JsonFields;
use super::{MAX_LAYERS, MAX_WIDTH};
use crate::model::ModelError;
use crate::model::spec::{Activation, ExpertRule, FlagRule, ModelSpec};

/// Most experts of a layer: twice those of any released checkpoint.
const MAX_EXPERTS: usize = 1024;
/// Most experts of a token. Released checkpoints have at most 22.
const MAX_EXPERTS_PER_TOKEN: usize = 64;
/// Limit of clamped activations if `swiglu_limit` is absent. `transformers` knows no other.
const SWIGLU_LIMIT: f64 = 7.0;

/// Feed-forward layers.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpConfig {
    /// Their activation.
    pub activation: Activation,
    /// The limit of [`Activation::SwigluOai`]; infinite for the others.
    pub limit: f32,
    /// Their experts.
    pub experts: Option<ExpertConfig>,
}

/// Experts of the layers that have them.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertConfig {
    /// Names and meaning of the tensors.
    pub rule: ExpertRule,
    /// Experts of a layer.
    pub count: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// Width between the projections of an expert.
    pub intermediate: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalized: bool,
    /// Layers without experts.
    pub dense: Vec<bool>,
}

impl MlpConfig {
    pub(super) fn parse(
        fields: &JsonFields<'_>,
        spec: &ModelSpec,
        layers: usize,
    ) -> Result<Self, ModelError> {
        let name = spec.activation.field;
        let activation = match (fields.text(name)?, spec.activation.default) {
            (None, default) => default,
            (Some("silu" | "swish"), Activation::SwigluOai) => Activation::SwigluOai,
            (Some(other), Activation::SwigluOai) => {
                return Err(fields.unsupported(&format!("{name} {other} of this family"), "silu"));
            }
            (Some("silu" | "swish"), _) => Activation::Silu,
            (Some("gelu_pytorch_tanh"), _) => Activation::GeluTanh,
            (Some(other), _) => {
                return Err(fields.unsupported(&format!("{name} {other}"), "silu, gelu_pytorch_tanh"));
            }
        };
        let limit = match activation {
            Activation::SwigluOai => fields.positive("swiglu_limit")?.unwrap_or(SWIGLU_LIMIT) as f32,
            Activation::Silu | Activation::GeluTanh => f32::INFINITY,
        };
        let experts = spec.experts.map(|rule| ExpertConfig::parse(fields, rule, layers)).transpose()?;
        if experts.is_none() {
            for experts in ["num_experts", "num_local_experts", "n_routed_experts"] {
                if fields.size_or_zero(experts)? > 1 {
                    return Err(fields.unsupported(&format!("{experts} of this family"), "dense layers"));
                }
            }
        }
        Ok(Self { activation, limit, experts })
    }
}

impl ExpertConfig {
    fn parse(fields: &JsonFields<'_>, rule: ExpertRule, layers: usize) -> Result<Self, ModelError> {
        let size = |(name, default), max| Ok::<_, ModelError>(fields.size(name, max)?.unwrap_or(default));
        let count = size(rule.count, MAX_EXPERTS)?;
        let per_token = size(("num_experts_per_tok", rule.per_token), MAX_EXPERTS_PER_TOKEN)?;
        if per_token > count {
            return Err(fields.malformed(format!("num_experts_per_tok {per_token} of {count} experts")));
        }
        for shared in ["shared_expert_intermediate_size", "n_shared_experts"] {
            if fields.size_or_zero(shared)? > 0 {
                return Err(fields.unsupported(shared, "routed experts"));
            }
        }
        Ok(Self {
            rule,
            count,
            per_token,
            intermediate: size(rule.intermediate, MAX_WIDTH)?,
            normalized: fields.follows(rule.normalized)?,
            dense: if rule.dense_layers { dense_layers(fields, layers)? } else { vec![false; layers] },
        })
    }

    /// Weights of one layer: the experts and the router.
    #[must_use]
    pub fn parameters(&self, hidden: usize) -> usize {
        self.count * hidden * (3 * self.intermediate + 1)
    }
}

/// The layers without experts: those that `mlp_only_layers` names, and all but every `decoder_sparse_step`-th.
fn dense_layers(fields: &JsonFields<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let step = fields.size("decoder_sparse_step", MAX_LAYERS)?.unwrap_or(1);
    let mut dense: Vec<bool> = (1..=layers).map(|number| !number.is_multiple_of(step)).collect();
    if let Some(named) = fields.get("mlp_only_layers") {
        let wrong = || fields.malformed(format!("mlp_only_layers is {named}, not a list of layers"));
        for layer in named.as_array().ok_or_else(wrong)? {
            let layer = layer.as_u64().ok_or_else(wrong)?;
            // As in transformers, a layer that does not exist has no effect.
            if let Some(dense) = usize::try_from(layer).ok().and_then(|layer| dense.get_mut(layer)) {
                *dense = true;
            }
        }
    }
    Ok(dense)
}

impl JsonFields<'_> {
    /// Whether a checkpoint has a property.
    pub(super) fn follows(&self, rule: FlagRule) -> Result<bool, ModelError> {
        match rule {
            FlagRule::Never => Ok(false),
            FlagRule::Always => Ok(true),
            FlagRule::Field(name) => Ok(self.flag(name)?.unwrap_or(false)),
            FlagRule::Unless(name) => Ok(self.flag(name)?.unwrap_or(true)),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::ModelConfig;
    use crate::model::ModelError;
    use crate::model::generation::GenerationDefaults;
    use crate::model::spec::Activation;

    fn parse(architecture: &str, changes: &Value) -> Result<ModelConfig, ModelError> {
        let mut config = json!({
            "architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100
        });
        for (key, value) in changes.as_object().expect("an object") {
            config[key] = value.clone();
        }
        ModelConfig::parse(config.to_string().as_bytes(), GenerationDefaults::default())
    }

    #[test]
    fn experts_are_read_from_the_fields_of_the_family() {
        let qwen = json!({"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
            "norm_topk_prob": true, "decoder_sparse_step": 2, "mlp_only_layers": [3, 99]});
        let config = parse("Qwen3MoeForCausalLM", &qwen).expect("a sound configuration");
        let experts = config.mlp.experts.as_ref().expect("experts");
        assert_eq!((experts.count, experts.per_token, experts.intermediate), (6, 3, 40));
        assert!(experts.normalized);
        assert_eq!(experts.dense, [true, false, true, true]);
        assert!(config.experts_of(1).is_some() && config.experts_of(0).is_none());
        let mixtral = parse("MixtralForCausalLM", &json!({"num_local_experts": 4})).expect("sound");
        let experts = mixtral.mlp.experts.as_ref().expect("experts");
        assert_eq!((experts.count, experts.per_token, experts.intermediate), (4, 2, 96));
        assert!(experts.normalized && !experts.dense.contains(&true));
    }

    #[test]
    fn nonsense_about_experts_is_named() {
        for (architecture, changes, words) in [
            ("MixtralForCausalLM", json!({"num_local_experts": 1}), "num_experts_per_tok 2 of 1"),
            ("MixtralForCausalLM", json!({"num_local_experts": 1_000_000}), "num_local_experts"),
            ("Qwen3MoeForCausalLM", json!({"num_experts": 0}), "num_experts 0"),
            ("Qwen3MoeForCausalLM", json!({"mlp_only_layers": 3}), "mlp_only_layers"),
            ("Qwen3MoeForCausalLM", json!({"shared_expert_intermediate_size": 64}), "shared_expert"),
            ("LlamaForCausalLM", json!({"num_experts": 4}), "num_experts"),
        ] {
            let error = parse(architecture, &changes).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn activations_are_read_from_the_field_of_the_family() {
        let of = |architecture, changes: Value| {
            parse(architecture, &changes).expect("a sound configuration").mlp.activation
        };
        assert_eq!(of("LlamaForCausalLM", json!({})), Activation::Silu);
        assert_eq!(of("LlamaForCausalLM", json!({"hidden_act": "gelu_pytorch_tanh"})), Activation::GeluTanh);
        assert_eq!(of("Gemma2ForCausalLM", json!({"hidden_act": "silu"})), Activation::GeluTanh);
        let error = parse("Gemma2ForCausalLM", &json!({"hidden_activation": "gelu"})).unwrap_err();
        assert!(error.to_string().contains("hidden_activation gelu"), "{error}");
    }

    #[test]
    fn gpt_oss_calls_its_clamped_activation_silu() {
        let of = |changes: Value| parse("GptOssForCausalLM", &changes).map(|config| config.mlp);
        for (changes, limit) in [
            (json!({}), 7.0),
            (json!({"hidden_act": "silu", "swiglu_limit": 7.0}), 7.0),
            (json!({"swiglu_limit": 2}), 2.0),
        ] {
            let mlp = of(changes).expect("a sound configuration");
            assert_eq!((mlp.activation, mlp.limit), (Activation::SwigluOai, limit));
            let experts = mlp.experts.expect("experts");
            assert_eq!((experts.count, experts.per_token, experts.intermediate), (128, 4, 96));
            assert!(experts.normalized && !experts.dense.contains(&true));
        }
        for (changes, words) in [
            (json!({"swiglu_limit": 0}), "swiglu_limit 0"),
            (json!({"swiglu_limit": "high"}), "swiglu_limit"),
            (json!({"hidden_act": "gelu_pytorch_tanh"}), "hidden_act gelu_pytorch_tanh"),
        ] {
            let error = of(changes).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        // Of another family the field has no meaning.
        let llama = parse("LlamaForCausalLM", &json!({"swiglu_limit": 7.0})).expect("sound");
        assert_eq!(llama.mlp.limit, f32::INFINITY);
    }
}
