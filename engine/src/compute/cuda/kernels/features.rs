//! What the kernels of a model compute beyond those of Llama.
//!
//! A feature is a constant of the sources. Kernels for a model without it have neither its parameter nor its code, so
//! that they are the same machine code as if it did not exist. A launch has the arguments of the features of its model,
//! after all others.

use crate::compute::cuda::device::{Element, Kernel};
use crate::model::config::ModelConfig;
use crate::model::spec::Activation;

baton_connector::labelled! {
    /// A feature, with its name in the sources.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum KernelFeature {
        /// Some layers have a window.
        Windows => "WINDOWS",
        /// Scores have a soft cap.
        ScoreCaps => "SCORE_CAPS",
        /// Logits have a soft cap.
        LogitCap => "LOGIT_CAP",
        /// The activation is GELU.
        Gelu => "GELU",
        /// Outputs of sublayers are normed before they are added.
        PostNorms => "POST_NORMS",
        /// Embeddings have a multiplier.
        ScaledEmbeddings => "SCALED_EMBEDDINGS",
        /// A part of each head is rotated.
        PartialRotary => "PARTIAL_ROTARY",
        /// Some layers have experts.
        Experts => "EXPERTS",
    }
}

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelFeatures(u16);

impl KernelFeatures {
    /// Those of Llama: none.
    pub const NONE: Self = Self(0);
    /// Every feature.
    pub const ALL: Self = Self((1 << KernelFeature::ALL.len()) - 1);

    /// Those of a model.
    #[must_use]
    pub fn of(config: &ModelConfig) -> Self {
        let (attention, names) = (&config.attention, &config.spec.tensors);
        let has = |feature: KernelFeature| match feature {
            KernelFeature::Windows => attention.windows.iter().any(Option::is_some),
            KernelFeature::ScoreCaps => attention.cap.is_some(),
            KernelFeature::LogitCap => config.logit_cap.is_some(),
            KernelFeature::Gelu => config.mlp.activation == Activation::GeluTanh,
            KernelFeature::PostNorms => names.attention_post_norm.is_some() || names.mlp_post_norm.is_some(),
            KernelFeature::ScaledEmbeddings => config.embedding_scale().is_some(),
            KernelFeature::PartialRotary => attention.rotary_dim != config.head_dim,
            KernelFeature::Experts => (0..config.layers).any(|layer| config.experts_of(layer).is_some()),
        };
        KernelFeature::ALL.into_iter().filter(|feature| has(*feature)).fold(Self::NONE, Self::with)
    }

    /// The set with another feature.
    #[must_use]
    pub const fn with(self, feature: KernelFeature) -> Self {
        Self(self.0 | (1 << feature as u16))
    }

    /// Whether a feature is in the set.
    #[must_use]
    pub const fn has(self, feature: KernelFeature) -> bool {
        self.0 & (1 << feature as u16) != 0
    }
}

/// What kernels are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelTarget {
    /// Element type.
    pub element: Element,
    /// Elements of a head.
    pub head_dim: usize,
    /// Features of the model.
    pub features: KernelFeatures,
}

impl KernelTarget {
    /// Kernels for Llama.
    #[must_use]
    pub fn plain(element: Element, head_dim: usize) -> Self {
        Self { element, head_dim, features: KernelFeatures::NONE }
    }

    /// Kernels for a model.
    #[must_use]
    pub fn of(config: &ModelConfig, element: Element) -> Self {
        Self { element, head_dim: config.head_dim, features: KernelFeatures::of(config) }
    }

    /// The kernels of the source, in the order of their definition.
    #[must_use]
    pub fn kernels(&self) -> Vec<Kernel> {
        Kernel::ALL.into_iter().filter(|kernel| self.contains(*kernel)).collect()
    }

    fn contains(&self, kernel: Kernel) -> bool {
        match kernel {
            Kernel::Embed
            | Kernel::AddRmsNorm
            | Kernel::RopeKv
            | Kernel::DecodeAttention
            | Kernel::MergeAttention
            | Kernel::PrefillAttention
            | Kernel::SiluMul
            | Kernel::BestOfParts
            | Kernel::Choose => true,
            Kernel::FewRowsWide | Kernel::FewRowsDeep | Kernel::FewRowsGated => self.element == Element::Bf16,
            Kernel::CapLogits => self.features.has(KernelFeature::LogitCap),
            Kernel::Route
            | Kernel::GroupExperts
            | Kernel::ExpertGateUp
            | Kernel::ExpertDown
            | Kernel::CombineExperts => self.features.has(KernelFeature::Experts),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::generation::GenerationDefaults;

    fn features(architecture: &str, changes: &Value) -> KernelFeatures {
        let mut config = json!({
            "architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100
        });
        for (key, value) in changes.as_object().expect("an object") {
            config[key] = value.clone();
        }
        let config = ModelConfig::parse(config.to_string().as_bytes(), GenerationDefaults::default());
        KernelFeatures::of(&config.expect("a sound configuration"))
    }

    fn set(of: &[KernelFeature]) -> KernelFeatures {
        of.iter().copied().fold(KernelFeatures::NONE, KernelFeatures::with)
    }

    #[test]
    fn a_model_has_the_features_of_its_family_and_its_configuration() {
        use KernelFeature as Feature;
        let gemma = [Feature::Windows, Feature::Gelu, Feature::PostNorms, Feature::ScaledEmbeddings];
        for (architecture, changes, wanted) in [
            ("LlamaForCausalLM", json!({}), set(&[])),
            ("Qwen2ForCausalLM", json!({}), set(&[])),
            ("Qwen3ForCausalLM", json!({}), set(&[])),
            ("MistralForCausalLM", json!({"sliding_window": null}), set(&[])),
            ("MistralForCausalLM", json!({"sliding_window": 64}), set(&[Feature::Windows])),
            ("Phi3ForCausalLM", json!({}), set(&[])),
            // With a long context the window is longer.
            (
                "Phi3ForCausalLM",
                json!({"sliding_window": 262_144, "max_position_embeddings": 131_072}),
                set(&[]),
            ),
            ("Phi3ForCausalLM", json!({"partial_rotary_factor": 0.75}), set(&[Feature::PartialRotary])),
            ("MixtralForCausalLM", json!({}), set(&[Feature::Experts])),
            ("Qwen3MoeForCausalLM", json!({"mlp_only_layers": [0, 1]}), set(&[])),
            ("Gemma3ForCausalLM", json!({}), set(&gemma)),
            ("Gemma2ForCausalLM", json!({}), set(&gemma).with(Feature::ScoreCaps).with(Feature::LogitCap)),
        ] {
            assert_eq!(features(architecture, &changes), wanted, "{architecture} {changes}");
        }
        assert_eq!(set(&KernelFeature::ALL), KernelFeatures::ALL);
    }
}
