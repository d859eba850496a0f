//! Attention of a checkpoint: rope, windows, scale and soft caps.

use super::json::JsonFields;
use super::rope::Rope;
use super::{MAX_LAYERS, MAX_POSITIONS};
use crate::model::ModelError;
use crate::model::spec::{ModelSpec, WindowRule};

/// Attention of every layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Rotary position embedding.
    pub rope: Rope,
    /// That of layers with a window, if it is another one.
    pub local_rope: Option<Rope>,
    /// Elements of a head that are rotated, from the first on; even.
    pub rotary_dim: usize,
    /// Window of each layer: the keys that a position sees, its own included. `None`: all.
    pub windows: Vec<Option<usize>>,
    /// Multiplier of scores.
    pub factor: f32,
    /// Soft cap of multiplied scores.
    pub cap: Option<f32>,
}

impl AttentionConfig {
    pub(super) fn parse(
        fields: &JsonFields<'_>,
        spec: &ModelSpec,
        (layers, head_dim, positions): (usize, usize, usize),
    ) -> Result<Self, ModelError> {
        if fields.flag("use_bidirectional_attention")?.unwrap_or(false) {
            return Err(fields.unsupported("use_bidirectional_attention", "causal attention"));
        }
        let (rope, local_rope) = Rope::of_layers(fields, positions, &spec.rope)?;
        let rotary_dim = rotary_dim(fields, spec, head_dim)?;
        if let Some([short, long]) = rope.divisors().filter(|counts| *counts != [rotary_dim / 2; 2]) {
            return Err(fields.malformed(format!(
                "rope short_factor and long_factor have {short} and {long} numbers, not {}",
                rotary_dim / 2
            )));
        }
        let factor = match spec.scales.query {
            None => 1.0 / (head_dim as f32).sqrt(),
            Some((field, default)) => (1.0 / fields.positive(field)?.unwrap_or(default).sqrt()) as f32,
        };
        Ok(Self {
            rope,
            local_rope,
            rotary_dim,
            windows: windows(fields, spec, layers)?,
            factor,
            cap: soft_cap(fields, "attn_logit_softcapping", spec.scales.attention_cap)?,
        })
    }

    /// Removes windows that hide no key of a sequence with at most this number of positions. Layers that have a rope
    /// of their own because of their window keep it.
    pub(super) fn fit_windows(&mut self, positions: usize) {
        if self.local_rope.is_none() {
            self.windows.iter_mut().for_each(|window| *window = window.filter(|width| *width < positions));
        }
    }

    /// The widest window, if every layer has one. No position sees earlier keys then.
    #[must_use]
    pub fn widest_window(&self) -> Option<usize> {
        self.windows.iter().copied().collect::<Option<Vec<usize>>>()?.into_iter().max()
    }

    /// The window of layer `layer`.
    #[must_use]
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }
}

/// A soft cap. `rule` is that of the family: see [`crate::model::spec::ScaleRules`].
pub(super) fn soft_cap(
    fields: &JsonFields<'_>,
    name: &str,
    rule: Option<Option<f64>>,
) -> Result<Option<f32>, ModelError> {
    let given = fields.positive(name)?;
    match rule {
        None if given.is_some() => Err(fields.unsupported(name, "no soft cap of this family")),
        None => Ok(None),
        Some(default) => Ok(given.or(default.filter(|_| !fields.has(name))).map(|cap| cap as f32)),
    }
}

/// The part of each head that is rotated.
fn rotary_dim(fields: &JsonFields<'_>, spec: &ModelSpec, head_dim: usize) -> Result<usize, ModelError> {
    const FIELD: &str = "partial_rotary_factor";
    let mut factor = fields.number(FIELD)?;
    for scaling in ["rope_parameters", "rope_scaling"] {
        let Some(scaling) = fields.object(scaling)? else { continue };
        factor = scaling.number(FIELD)?.or(factor);
        for kind in ["full_attention", "sliding_attention"] {
            if let Some(kind) = scaling.get(kind).and_then(|kind| kind.get(FIELD)) {
                factor = kind.as_f64().filter(|kind| *kind != 1.0).or(factor);
            }
        }
    }
    match factor {
        None | Some(1.0) => Ok(head_dim),
        Some(_) if !spec.rope.partial => Err(fields.unsupported(FIELD, "rotary embedding of whole heads")),
        // Rounded down, as in transformers.
        Some(factor) => match (head_dim as f64 * factor) as usize {
            dim if factor < 1.0 && dim >= 2 && dim.is_multiple_of(2) => Ok(dim),
            dim => Err(fields.malformed(format!("{FIELD} {factor} rotates {dim} of {head_dim} elements"))),
        },
    }
}

/// The window of each layer.
fn windows(
    fields: &JsonFields<'_>,
    spec: &ModelSpec,
    layers: usize,
) -> Result<Vec<Option<usize>>, ModelError> {
    let width = fields.size("sliding_window", MAX_POSITIONS)?;
    let or_default = |default: Option<usize>| width.or(default.filter(|_| !fields.has("sliding_window")));
    let flagged = fields.flag("use_sliding_window")?.unwrap_or(false);
    let named = layers_with_a_window(fields, layers)?;
    let no_layer = || vec![None; layers];
    let of_named = |named: &[bool], width: Option<usize>| {
        named.iter().map(|has| width.filter(|_| *has)).collect::<Vec<_>>()
    };
    if let (WindowRule::Never | WindowRule::Flagged { .. } | WindowRule::Whole(_), Some(named)) =
        (spec.windows, &named)
        && named.contains(&true)
    {
        return Err(fields.unsupported("layer_types other than full_attention", "full attention"));
    }
    Ok(match spec.windows {
        WindowRule::Never => no_layer(),
        WindowRule::Flagged { width } => vec![or_default(Some(width)).filter(|_| flagged); layers],
        WindowRule::Whole(default) => vec![or_default(default); layers],
        WindowRule::FromLayer { width } => match (named, or_default(Some(width)).filter(|_| flagged)) {
            (_, None) => no_layer(),
            (Some(named), width) => of_named(&named, width),
            (None, width) => {
                // The default of transformers.
                let given = fields.has("max_window_layers");
                let from = if given { fields.size_or_zero("max_window_layers")? } else { 28 };
                (0..layers).map(|layer| width.filter(|_| layer >= from)).collect()
            }
        },
        WindowRule::AllBut { every, field, width: default } => {
            let every = match field {
                Some(field) => fields.size(field, MAX_LAYERS)?.unwrap_or(every),
                None => every,
            };
            let by_rule = || (1..=layers).map(|number| !number.is_multiple_of(every)).collect();
            of_named(&named.unwrap_or_else(by_rule), or_default(Some(default)))
        }
    })
}

/// The layers that `layer_types` names as those with a window, if the list is there.
fn layers_with_a_window(fields: &JsonFields<'_>, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(list) = fields.get("layer_types") else { return Ok(None) };
    let list = list
        .as_array()
        .filter(|list| list.len() == layers)
        .ok_or_else(|| fields.malformed(format!("layer_types is not a list of {layers} names")))?;
    let window = |kind: &serde_json::Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(fields.unsupported(&format!("layer type {kind}"), "full_attention, sliding_attention")),
    };
    list.iter().map(window).collect::<Result<_, _>>().map(Some)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{ModelConfig, RopeScaling};
    use crate::model::ModelError;
    use crate::model::generation::GenerationDefaults;

    fn parse(architecture: &str, changes: &Value) -> Result<ModelConfig, ModelError> {
        let mut config = json!({
            "architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 6,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
            "vocab_size": 100
        });
        for (key, value) in changes.as_object().expect("an object") {
            config[key] = value.clone();
        }
        ModelConfig::parse(config.to_string().as_bytes(), GenerationDefaults::default())
    }

    fn windows(architecture: &str, changes: &Value) -> Vec<usize> {
        let config = parse(architecture, changes).expect("a sound configuration");
        config.attention.windows.iter().map(|window| window.unwrap_or(0)).collect()
    }

    #[test]
    fn windows_follow_the_rule_of_the_family() {
        for (architecture, changes, wanted) in [
            ("LlamaForCausalLM", json!({"sliding_window": 9}), [0; 6]),
            ("MistralForCausalLM", json!({"sliding_window": 9}), [9; 6]),
            ("MistralForCausalLM", json!({"sliding_window": null}), [0; 6]),
            ("MistralForCausalLM", json!({}), [4096; 6]),
            ("MixtralForCausalLM", json!({}), [0; 6]),
            ("Phi3ForCausalLM", json!({"sliding_window": 9}), [9; 6]),
            ("Gemma2ForCausalLM", json!({"sliding_window": 9}), [9, 0, 9, 0, 9, 0]),
            ("Gemma3ForCausalLM", json!({"sliding_window": 9}), [9, 9, 9, 9, 9, 0]),
            ("GptOssForCausalLM", json!({}), [128, 0, 128, 0, 128, 0]),
            ("GptOssForCausalLM", json!({"sliding_window": null}), [0; 6]),
            (
                "Gemma3ForCausalLM",
                json!({"sliding_window": 9, "sliding_window_pattern": 3}),
                [9, 9, 0, 9, 9, 0],
            ),
            ("Qwen3MoeForCausalLM", json!({"sliding_window": 9, "use_sliding_window": true}), [9; 6]),
            ("Qwen3MoeForCausalLM", json!({"sliding_window": 9}), [0; 6]),
            ("Qwen3MoeForCausalLM", json!({"use_sliding_window": true}), [4096; 6]),
            ("Qwen3MoeForCausalLM", json!({"use_sliding_window": true, "sliding_window": null}), [0; 6]),
            (
                "Qwen3ForCausalLM",
                json!({"use_sliding_window": true, "max_window_layers": 5}),
                [0, 0, 0, 0, 0, 4096],
            ),
            // No position sees fewer keys with such a window.
            ("MistralForCausalLM", json!({"max_position_embeddings": 4096}), [0; 6]),
            ("MistralForCausalLM", json!({"max_position_embeddings": 4097}), [4096; 6]),
            (
                "Phi3ForCausalLM",
                json!({"sliding_window": 262_144, "max_position_embeddings": 131_072}),
                [0; 6],
            ),
            ("Gemma2ForCausalLM", json!({"sliding_window": 4096, "max_position_embeddings": 4096}), [0; 6]),
            // Layers with a window have a rope of their own.
            (
                "Gemma3ForCausalLM",
                json!({"sliding_window": 512, "max_position_embeddings": 512}),
                [512, 512, 512, 512, 512, 0],
            ),
            (
                "Qwen2ForCausalLM",
                json!({"sliding_window": 9, "use_sliding_window": true, "max_window_layers": 4}),
                [0, 0, 0, 0, 9, 9],
            ),
        ] {
            assert_eq!(windows(architecture, &changes), wanted, "{architecture} {changes}");
        }
    }

    #[test]
    fn a_window_of_the_engines_whole_context_is_none() {
        let mistral = parse("MistralForCausalLM", &json!({"sliding_window": 64})).expect("sound");
        assert_eq!(mistral.clone().for_positions(65).attention.windows, [Some(64); 6]);
        assert_eq!(mistral.for_positions(64).attention.windows, [None; 6]);
        let gemma = parse("Gemma3ForCausalLM", &json!({"sliding_window": 64})).expect("sound");
        assert_eq!(gemma.for_positions(64).attention.window(0), Some(64));
    }

    #[test]
    fn keys_are_hidden_from_all_layers_only_if_each_has_a_window() {
        let widest =
            |architecture, changes| parse(architecture, &changes).expect("sound").attention.widest_window();
        assert_eq!(widest("MistralForCausalLM", json!({"sliding_window": 9})), Some(9));
        assert_eq!(widest("MistralForCausalLM", json!({"sliding_window": null})), None);
        assert_eq!(widest("Gemma3ForCausalLM", json!({"sliding_window": 9})), None);
    }

    #[test]
    fn a_list_of_layer_types_wins_over_the_rule() {
        let kinds = ["full_attention", "sliding_attention"];
        let types: Vec<_> = (0..6).map(|layer| kinds[usize::from(layer >= 4)]).collect();
        let list = json!({"layer_types": types, "sliding_window": 9, "use_sliding_window": true});
        for architecture in ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM"] {
            assert_eq!(windows(architecture, &list), [0, 0, 0, 0, 9, 9], "{architecture}");
        }
        let chunked = vec!["chunked_attention"; 6];
        for (architecture, changes, words) in [
            ("LlamaForCausalLM", list, "layer_types"),
            ("Gemma2ForCausalLM", json!({"layer_types": ["full_attention"]}), "list of 6"),
            ("Gemma2ForCausalLM", json!({"layer_types": chunked}), "chunked_attention"),
        ] {
            let error = parse(architecture, &changes).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn null_removes_a_soft_cap_and_an_absent_field_keeps_the_default() {
        let caps = |architecture, changes: Value| {
            let config = parse(architecture, &changes).expect("a sound configuration");
            (config.attention.cap, config.logit_cap)
        };
        let gemma2 = "Gemma2ForCausalLM";
        assert_eq!(caps(gemma2, json!({})), (Some(50.0), Some(30.0)));
        let null = json!({"attn_logit_softcapping": null, "final_logit_softcapping": 7});
        assert_eq!(caps(gemma2, null.clone()), (None, Some(7.0)));
        assert_eq!(caps("Gemma3ForCausalLM", null), (None, Some(7.0)));
        assert_eq!(caps("Gemma3ForCausalLM", json!({})), (None, None));
        for architecture in ["Gemma3ForCausalLM", "LlamaForCausalLM"] {
            let error = parse(architecture, &json!({"attn_logit_softcapping": 5.0})).unwrap_err();
            assert!(error.to_string().contains("attn_logit_softcapping"), "{error}");
        }
    }

    #[test]
    fn layers_with_a_window_have_a_rope_of_their_own_in_both_dialects() {
        let scaling = json!({"rope_type": "linear", "factor": 8.0});
        let legacy = json!({"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling});
        let mut whole = scaling;
        whole["rope_theta"] = json!(5e5);
        let local = json!({"rope_type": "default", "rope_theta": 2e4});
        let current = json!({"rope_parameters": {"full_attention": whole, "sliding_attention": local}});
        let of = |changes| parse("Gemma3ForCausalLM", changes).expect("a sound configuration");
        assert_eq!(of(&legacy), of(&current));
        let config = of(&legacy);
        assert_eq!(config.attention.rope.theta, 5e5);
        assert_eq!(config.attention.local_rope.map(|rope| rope.theta), Some(2e4));
        // The declared context contains the stretching.
        assert_eq!(config.max_positions, 131_072);
        let plain = of(&json!({}));
        assert_eq!(plain.attention.rope.theta, 1e6);
        assert_eq!(plain.attention.local_rope.map(|rope| rope.theta), Some(1e4));
    }

    #[test]
    fn a_part_of_a_head_is_rotated_only_in_families_that_do_it() {
        let partial = json!({"partial_rotary_factor": 0.75});
        let config = parse("Phi3ForCausalLM", &partial).expect("a sound configuration");
        assert_eq!(config.attention.rotary_dim, 12);
        for (architecture, changes, words) in [
            ("LlamaForCausalLM", partial, "partial_rotary_factor"),
            ("Phi3ForCausalLM", json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor 1.5"),
            ("Phi3ForCausalLM", json!({"rope_scaling": {"type": "longrope"}}), "short_factor is absent"),
            ("Phi3ForCausalLM", json!({"rope_scaling": {"type": "llama3"}}), "llama3"),
            // Phi-3 means its own scaling by this name.
            (
                "Phi3ForCausalLM",
                json!({"rope_scaling": {"type": "yarn", "short_factor": [1], "long_factor": [1, 2]}}),
                "1 and 2 numbers, not 8",
            ),
            ("Gemma3ForCausalLM", json!({"use_bidirectional_attention": true}), "bidirectional"),
        ] {
            let error = parse(architecture, &changes).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn the_original_context_of_longrope_is_found_in_both_dialects() {
        let numbers = vec![1.5; 8];
        let original = |config: &ModelConfig| match config.attention.rope.scaling {
            RopeScaling::Long { original_positions, attention_factor, .. } => {
                (original_positions, attention_factor)
            }
            _ => panic!("longrope"),
        };
        let of = |inside: Option<u32>, outside: Option<u32>| {
            let mut scaling =
                json!({"rope_type": "longrope", "short_factor": numbers, "long_factor": numbers});
            if let Some(inside) = inside {
                scaling["original_max_position_embeddings"] = json!(inside);
            }
            let mut legacy = json!({"max_position_embeddings": 131_072, "rope_theta": 5e5});
            if let Some(outside) = outside {
                legacy["original_max_position_embeddings"] = json!(outside);
            }
            let mut current = legacy.clone();
            legacy["rope_scaling"] = scaling.clone();
            scaling["rope_theta"] = json!(5e5);
            current["rope_theta"] = json!(null);
            current["rope_parameters"] = scaling;
            let [legacy, current] = [legacy, current]
                .map(|changes| parse("Phi3ForCausalLM", &changes).expect("a sound configuration"));
            assert_eq!(legacy, current);
            original(&current)
        };
        let factor = (1.0 + 32.0_f64.ln() / 4096.0_f64.ln()).sqrt();
        assert_eq!(of(None, Some(4096)), (4096.0, factor));
        assert_eq!(of(Some(8192), Some(4096)), (4096.0, factor));
        assert_eq!(of(Some(8192), None).0, 8192.0);
        assert_eq!(of(None, None), (4096.0, factor));
    }

    #[test]
    fn gpt_oss_stretches_its_rope_as_its_checkpoints_say_without_a_description_too() {
        // As in openai/gpt-oss-20b.
        let released = json!({"attention_bias": true, "max_position_embeddings": 131_072, "rope_theta": 150_000,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                "original_max_position_embeddings": 4096, "truncate": false}});
        let config = parse("GptOssForCausalLM", &released).expect("sound");
        assert_eq!(parse("GptOssForCausalLM", &json!({})).expect("sound"), config);
        assert!(config.biases.qkv && config.biases.output && !config.biases.mlp);
        assert_eq!((config.attention.rope.theta, config.max_positions), (150_000.0, 131_072));
        let plain = json!({"attention_bias": false, "rope_parameters": {"rope_theta": 10_000.0}});
        let plain = parse("GptOssForCausalLM", &plain).expect("sound");
        assert_eq!(plain.attention.rope.scaling, RopeScaling::None);
        assert!(!plain.biases.qkv && !plain.biases.output);
    }

    #[test]
    fn scores_are_scaled_by_the_familys_field() {
        let factor = |architecture, changes: Value| {
            parse(architecture, &changes).expect("a sound configuration").attention.factor
        };
        assert_eq!(factor("LlamaForCausalLM", json!({"query_pre_attn_scalar": 4})), 0.25);
        assert_eq!(factor("Gemma2ForCausalLM", json!({"query_pre_attn_scalar": 4})), 0.5);
        assert_eq!(factor("Gemma2ForCausalLM", json!({})), 1.0 / 16.0);
    }
}
