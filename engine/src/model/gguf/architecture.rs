//! The computation that GGUF metadata describes, as the fields of `config.json`, and the checkpoint's tensor names.
//!
//! The fields pass the same checks as those of a Hugging Face checkpoint. A value that would change the computation and
//! has no field is refused by name. So is every tensor without a place in the model.

use serde_json::{Value, json};

use super::header::{GgufHeader, GgufTensor};
use super::places::{PartPlace, TensorPlace};
use crate::model::ModelError;
use crate::model::spec::{MAX_LAYERS, ModelSpec, RopeStretch, WindowRule};

/// The key of the architecture's name, which is the prefix of its other keys.
const ARCHITECTURE_KEY: &str = "general.architecture";
/// Architectures that are computed: their name here, and that of their family in [`crate::model::spec`].
pub(super) const ARCHITECTURES: [(&str, &str); 7] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("qwen3moe", "Qwen3MoeForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("gemma3", "Gemma3ForCausalLM"),
];
/// The family of `llama` with experts.
const LLAMA_WITH_EXPERTS: &str = "MixtralForCausalLM";
/// Layers of the models of 27B, whose scores have another scale: of `gemma2`, and of `gemma3`. llama.cpp recognizes
/// them by this number too.
const GEMMA_27B_LAYERS: [(&str, usize); 2] = [("gemma2", 46), ("gemma3", 62)];
/// Base of the local rope of `gemma3` if the file has none.
const LOCAL_THETA: f64 = 10_000.0;
/// Most experts of a layer, as in `config.json`.
const MAX_EXPERTS: usize = 1024;
/// Keys that change the computation, below the architecture's prefix, and the value without an effect.
const NOT_COMPUTED: [(&str, f64); 14] = [
    ("logit_scale", 1.0),
    ("residual_scale", 1.0),
    ("embedding_scale", 1.0),
    ("attention.scale", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.temperature_scale", 0.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
    ("expert_shared_count", 0.0),
    ("expert_shared_feed_forward_length", 0.0),
    ("expert_group_count", 0.0),
    ("expert_weights_scale", 1.0),
    ("leading_dense_block_count", 0.0),
];

/// The architecture's metadata.
#[derive(Debug)]
pub(super) struct GgufModel<'a> {
    /// The files' headers. The first one contains the metadata.
    headers: &'a [GgufHeader<'a>],
    header: &'a GgufHeader<'a>,
    name: &'a str,
    spec: &'static ModelSpec,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    /// Experts of a layer; 0 for none.
    experts: usize,
}

impl<'a> GgufModel<'a> {
    /// Reads what the other functions need from the headers of all files.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for an architecture that is not computed. [`ModelError::Malformed`].
    ///
    /// # Panics
    /// Without headers.
    pub(super) fn read(headers: &'a [GgufHeader<'a>]) -> Result<Self, ModelError> {
        let header = &headers[0];
        let absent = |key: &str| header.malformed(format!("{key} is absent"));
        let name = header.text(ARCHITECTURE_KEY)?.ok_or_else(|| absent(ARCHITECTURE_KEY))?;
        let named = ARCHITECTURES.iter().find(|(known, _)| *known == name);
        let experts = header.size(&format!("{name}.expert_count"))?.unwrap_or(0);
        if experts > MAX_EXPERTS {
            let what = format!("{name}.expert_count {experts} is more than {MAX_EXPERTS}");
            return Err(header.malformed(what));
        }
        let family = match named {
            Some(("llama", _)) if experts > 0 => Some(LLAMA_WITH_EXPERTS),
            other => other.map(|(_, family)| *family),
        };
        let spec = family.and_then(ModelSpec::named);
        let spec = spec.ok_or_else(|| header.unsupported(&format!("architecture {name}"), &supported()))?;
        if spec.experts.is_none() && experts > 0 {
            let what = format!("{name}.expert_count {experts}");
            return Err(header.unsupported(&what, "supported: dense layers of this architecture"));
        }
        let mut model = Self { headers, header, name, spec, layers: 0, heads: 0, kv_heads: 0, experts };
        if spec.experts.is_some() && experts == 0 {
            return Err(model.absent("expert_count"));
        }
        model.layers = model.required("block_count")?;
        if model.layers > MAX_LAYERS {
            let what = format!("{name}.block_count {} is more than {MAX_LAYERS}", model.layers);
            return Err(header.malformed(what));
        }
        model.heads = model.required("attention.head_count")?;
        model.kv_heads = model.size("attention.head_count_kv")?.unwrap_or(model.heads);
        Ok(model)
    }

    /// The fields of `config.json`. `ends` are tokens that end a text.
    ///
    /// # Errors
    /// [`ModelError`].
    pub(super) fn config(&self, bos: Option<u32>, ends: &[u32]) -> Result<Value, ModelError> {
        self.refuse_what_is_not_computed()?;
        let header = self.header;
        let hidden = self.required("embedding_length")?;
        let head_dim = match self.size("attention.key_length")? {
            Some(dim) => dim,
            None if self.heads > 0 && hidden.is_multiple_of(self.heads) => hidden / self.heads,
            None => {
                let heads = self.heads;
                let what =
                    format!("{}.embedding_length {hidden} is not a multiple of {heads} heads", self.name);
                return Err(header.malformed(what));
            }
        };
        if let Some(other) = self.size("attention.value_length")?.filter(|other| *other != head_dim) {
            let what = format!("{}.attention.value_length {other} with heads of {head_dim}", self.name);
            return Err(header.unsupported(&what, "supported: equal sizes"));
        }
        let rotated = self.size("rope.dimension_count")?.unwrap_or(head_dim);
        if rotated == 0 || rotated > head_dim || (rotated < head_dim && !self.spec.rope.partial) {
            let what = format!("{}.rope.dimension_count {rotated} with heads of {head_dim}", self.name);
            return Err(header.unsupported(&what, "supported: equal sizes"));
        }
        let embedding = self.tensor("token_embd.weight");
        let vocab = embedding.and_then(|(tensor, _)| tensor.shape.first().copied());
        let vocab = vocab.ok_or_else(|| header.malformed("tensor token_embd.weight is missing".into()))?;
        let theta = self.number("rope.freq_base")?.unwrap_or(self.spec.rope.theta);
        let epsilon = "attention.layer_norm_rms_epsilon";
        let epsilon = self.number(epsilon)?.ok_or_else(|| self.absent(epsilon))?;
        let has = |name: &str| self.tensor(name).is_some();
        let mut config = json!({
            "architectures": [self.spec.architecture],
            "hidden_size": hidden,
            "intermediate_size": self.required("feed_forward_length")?,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "max_position_embeddings": self.required("context_length")?,
            "rms_norm_eps": epsilon,
            "rope_theta": theta,
            "rope_scaling": self.rope_scaling(theta, rotated)?,
            "tie_word_embeddings": !has("output.weight"),
            // Where the biases are part of the family, the field has no effect.
            "attention_bias": self.has_bias(&["attn_q", "attn_k", "attn_v", "attn_output"]),
            "mlp_bias": self.has_bias(&["ffn_gate", "ffn_up", "ffn_down"]),
            "bos_token_id": bos,
            "eos_token_id": ends,
        });
        if rotated < head_dim {
            // Rounded down to the elements: a half more than the number keeps it.
            config["partial_rotary_factor"] = json!((rotated as f64 + 0.5) / head_dim as f64);
        }
        self.add_windows(&mut config)?;
        self.add_scales(&mut config, hidden, head_dim)?;
        self.add_experts(&mut config)?;
        Ok(config)
    }

    /// Adds the fields of attention windows.
    fn add_windows(&self, config: &mut Value) -> Result<(), ModelError> {
        const KEY: &str = "attention.sliding_window";
        let width = self.size(KEY)?.filter(|width| *width > 0);
        match self.spec.windows {
            WindowRule::Whole(_) => config["sliding_window"] = json!(width),
            WindowRule::AllBut { every, field, .. } => {
                match width {
                    Some(width) => config["sliding_window"] = json!(width),
                    // As in llama.cpp: `gemma3` has no windows then, and no layer has the local rope. `gemma2` has the
                    // default of the family.
                    None if self.spec.rope.local_theta.is_some() => config["sliding_window"] = Value::Null,
                    None => {}
                }
                let every = match self.size("attention.sliding_window_pattern")? {
                    Some(other) if field.is_none() && other != every => {
                        let what = format!("{}.attention.sliding_window_pattern {other}", self.name);
                        return Err(self.header.unsupported(&what, &format!("supported: {every}")));
                    }
                    other => other.unwrap_or(every),
                };
                if let Some(field) = field {
                    config[field] = json!(every);
                }
            }
            WindowRule::Never | WindowRule::FromLayer { .. } | WindowRule::Flagged { .. } => {
                // A window as long as the context is none.
                let context = self.size("context_length")?.unwrap_or(0);
                if let Some(width) = width.filter(|width| *width < context) {
                    let what = format!("{}.{KEY} {width}", self.name);
                    return Err(self.header.unsupported(&what, "supported: full attention"));
                }
            }
        }
        Ok(())
    }

    /// Adds the scale of scores and the soft caps.
    fn add_scales(&self, config: &mut Value, hidden: usize, head_dim: usize) -> Result<(), ModelError> {
        let scales = &self.spec.scales;
        if let Some((field, _)) = scales.query {
            let is_27b = GEMMA_27B_LAYERS.contains(&(self.name, self.layers)) && self.heads > 0;
            config[field] = json!(if is_27b { hidden / self.heads } else { head_dim });
        }
        for (key, rule) in
            [("attn_logit_softcapping", scales.attention_cap), ("final_logit_softcapping", scales.logit_cap)]
        {
            let cap = self.number(key)?;
            if let (None, Some(cap)) = (rule, cap.filter(|cap| *cap != 0.0)) {
                let what = format!("{}.{key} {cap}", self.name);
                return Err(self.header.unsupported(&what, "supported: no soft cap of this architecture"));
            }
            // Without the key the family's default counts. Zero means that there is none.
            if let (Some(_), Some(cap)) = (rule, cap) {
                config[key] = if cap == 0.0 { Value::Null } else { json!(cap) };
            }
        }
        if self.spec.rope.local_theta.is_some() {
            let theta = self.number("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA);
            config["rope_local_base_freq"] = json!(theta);
        }
        Ok(())
    }

    /// Adds the fields of experts.
    fn add_experts(&self, config: &mut Value) -> Result<(), ModelError> {
        let Some(rule) = self.spec.experts else { return Ok(()) };
        // 1: softmax, which both families have.
        if let Some(other) = self.size("expert_gating_func")?.filter(|kind| *kind > 1) {
            let what = format!("{}.expert_gating_func {other}", self.name);
            return Err(self.header.unsupported(&what, "supported: softmax"));
        }
        if self.header.flag(&self.key("expert_weights_norm"))? == Some(false) {
            let what = format!("{}.expert_weights_norm false", self.name);
            return Err(self.header.unsupported(&what, "supported: normalized weights"));
        }
        let width = match self.size("expert_feed_forward_length")? {
            Some(width) => width,
            None => self.required("feed_forward_length")?,
        };
        config[rule.count.0] = json!(self.experts);
        config["num_experts_per_tok"] = json!(self.required("expert_used_count")?);
        config[rule.intermediate.0] = json!(width);
        // llama.cpp divides the weights by their sum in both families.
        config["norm_topk_prob"] = json!(true);
        Ok(())
    }

    /// The place of a tensor. `None` for one that is part of the configuration.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for a tensor that the model does not have.
    pub(super) fn place(&self, tensor: &GgufTensor<'_>) -> Result<Option<TensorPlace>, ModelError> {
        let (names, offset) = (&self.spec.tensors, self.spec.norm_offset);
        match tensor.name {
            "token_embd.weight" => return Ok(Some(TensorPlace::of(names.embedding, PartPlace::Matrix))),
            "output_norm.weight" => {
                return Ok(Some(TensorPlace::of(names.final_norm, PartPlace::Norm(offset))));
            }
            "output.weight" => return Ok(Some(TensorPlace::of(names.head, PartPlace::Matrix))),
            // `config` compares it with the frequencies that it describes, or contains it.
            "rope_freqs.weight" if self.spec.rope.stretch != RopeStretch::Long => return Ok(None),
            "rope_factors_short.weight" | "rope_factors_long.weight"
                if self.spec.rope.stretch == RopeStretch::Long =>
            {
                return Ok(None);
            }
            _ => {}
        }
        let layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let layer = layer.and_then(|(layer, part)| {
            let number = layer.parse::<usize>().ok().filter(|number| *number < self.layers)?;
            // One spelling of each number, so that two tensors cannot have one place.
            (number.to_string() == layer).then_some((number, part))
        });
        let is_rotated_by_neighbours = self.name == "llama";
        let place = layer.and_then(|(number, part)| {
            let heads = is_rotated_by_neighbours.then_some([self.heads, self.kv_heads]);
            TensorPlace::in_layer(self.spec, number, part, heads)
        });
        let Some(place) = place else {
            let what = format!("tensor {} of architecture {}", tensor.name, self.name);
            let supported = "supported: the tensors of the architecture's layers";
            return Err(self.header.unsupported(&what, supported));
        };
        if matches!(place.part, PartPlace::Experts { .. }) {
            let is_of_experts = tensor.shape.len() == 3 && tensor.shape[0] == self.experts;
            if !is_of_experts {
                let (name, shape, experts) = (tensor.name, &tensor.shape, self.experts);
                let what = format!("tensor {name} has shape {shape:?}, not one of {experts} experts");
                return Err(self.header.malformed(what));
            }
        }
        Ok(Some(place))
    }

    /// Whether any layer has a bias of one of these parts. The model then needs all of them.
    fn has_bias(&self, parts: &[&str]) -> bool {
        let is_one = |name: &str| {
            let part = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
            let part = part.and_then(|(_, part)| part.strip_suffix(".bias"));
            part.is_some_and(|part| parts.contains(&part))
        };
        self.headers.iter().flat_map(|header| header.tensors()).any(|tensor| is_one(tensor.name))
    }

    fn refuse_what_is_not_computed(&self) -> Result<(), ModelError> {
        for (key, harmless) in NOT_COMPUTED {
            if let Some(value) = self.number(key)?.filter(|value| *value != harmless) {
                let what = format!("{}.{key} {value}", self.name);
                return Err(self.header.unsupported(&what, &format!("supported: {harmless}")));
            }
        }
        let key = self.key("attention.causal");
        if self.header.flag(&key)? == Some(false) {
            return Err(self.header.unsupported(&format!("{key} false"), "supported: causal attention"));
        }
        Ok(())
    }

    /// `rope_scaling`, or null.
    fn rope_scaling(&self, theta: f64, head_dim: usize) -> Result<Value, ModelError> {
        let header = self.header;
        if self.spec.rope.stretch == RopeStretch::Long {
            return self.long_scaling(head_dim);
        }
        self.refuse_attention_factor()?;
        let kind = header.text(&self.key("rope.scaling.type"))?;
        let factor = match self.number("rope.scaling.factor")? {
            None => self.number("rope.scale_linear")?,
            factor => factor,
        };
        let kind = match kind {
            // Older files have only the factor.
            None if factor.is_some_and(|factor| factor != 0.0 && factor != 1.0) => Some("linear"),
            kind => kind,
        };
        let divided = self.tensor("rope_freqs.weight");
        match (kind, divided) {
            (None | Some("none"), None) => Ok(Value::Null),
            (None | Some("none"), Some((tensor, bytes))) => {
                self.llama3_scaling(tensor, bytes, theta, head_dim)
            }
            (Some(kind), Some(_)) => {
                let what = format!("rope_freqs.weight with rope scaling {kind}");
                Err(header.unsupported(&what, "supported: one of them"))
            }
            (Some("linear"), None) => Ok(json!({ "rope_type": "linear", "factor": factor })),
            (Some("yarn"), None) => Ok(json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": self.size("rope.scaling.original_context_length")?,
                "beta_fast": self.number("rope.scaling.yarn_beta_fast")?,
                "beta_slow": self.number("rope.scaling.yarn_beta_slow")?,
            })),
            (Some(other), None) => Err(header.unsupported(
                &format!("rope scaling {other}"),
                "supported: none, linear, yarn, rope_freqs.weight",
            )),
        }
    }

    /// Refuses a multiplier of cos and sin.
    fn refuse_attention_factor(&self) -> Result<(), ModelError> {
        match self.number("rope.scaling.attn_factor")?.filter(|factor| *factor != 1.0) {
            None => Ok(()),
            Some(factor) => {
                let what = format!("{}.rope.scaling.attn_factor {factor}", self.name);
                Err(self.header.unsupported(&what, "supported: 1"))
            }
        }
    }

    /// Parameters of Llama 3's scaling that give the divisors in `rope_freqs.weight`.
    ///
    /// The file contains one divisor for each frequency, rounded to f32. Frequencies from the parameters equal those of
    /// the original checkpoint bit for bit, and those from the divisors do not. Released models have the factors 1 and
    /// 4, and an original context that is a power of two.
    fn llama3_scaling(
        &self,
        tensor: &GgufTensor<'_>,
        bytes: &[u8],
        theta: f64,
        head_dim: usize,
    ) -> Result<Value, ModelError> {
        const LOW: f64 = 1.0;
        const HIGH: f64 = 4.0;
        if tensor.shape != [head_dim / 2] {
            let what = format!("rope_freqs.weight has shape {:?}, not [{}]", tensor.shape, head_dim / 2);
            return Err(self.header.malformed(what));
        }
        let mut divisors = vec![0.0; tensor.shape[0]];
        tensor.kind.read_f32(bytes, 0, &mut divisors);
        let factor = divisors.iter().fold(1.0_f64, |largest, divisor| largest.max(f64::from(*divisor)));
        let expected = |original: f64, pair: usize| {
            let wavelength = 2.0 * std::f64::consts::PI * theta.powf(2.0 * pair as f64 / head_dim as f64);
            if wavelength > original / LOW {
                factor
            } else if wavelength < original / HIGH {
                1.0
            } else {
                let smooth = (original / wavelength - LOW) / (HIGH - LOW);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        let agrees = |original: &f64| {
            divisors.iter().enumerate().all(|(pair, divisor)| {
                let wanted = expected(*original, pair);
                (f64::from(*divisor) - wanted).abs() <= 1e-4 * wanted
            })
        };
        let original = (5..=24).rev().map(|power| f64::from(1_u32 << power)).find(agrees);
        match original {
            Some(original) => Ok(json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": original,
            })),
            None => Err(self.header.unsupported("rope_freqs.weight", "supported: the divisors of Llama 3")),
        }
    }

    /// LongRoPE: its divisors are tensors.
    fn long_scaling(&self, rotated: usize) -> Result<Value, ModelError> {
        let header = self.header;
        let divisors = |name: &str| {
            let Some((tensor, bytes)) = self.tensor(name) else { return Ok(None) };
            if tensor.shape != [rotated / 2] {
                let what = format!("{name} has shape {:?}, not [{}]", tensor.shape, rotated / 2);
                return Err(header.malformed(what));
            }
            let mut values = vec![0.0; tensor.shape[0]];
            tensor.kind.read_f32(bytes, 0, &mut values);
            Ok(Some(values))
        };
        let found = (divisors("rope_factors_short.weight")?, divisors("rope_factors_long.weight")?);
        // llama.cpp divides all frequencies by it, whatever the kind. Zero means that there is none.
        for key in ["rope.scaling.factor", "rope.scale_linear"] {
            if let Some(factor) = self.number(key)?.filter(|factor| *factor != 0.0 && *factor != 1.0) {
                let what = format!("{}.{key} {factor}", self.name);
                return Err(header.unsupported(&what, "supported: 1"));
            }
        }
        let kind = header.text(&self.key("rope.scaling.type"))?;
        let (short, long) = match found {
            (Some(short), Some(long)) => match kind {
                None | Some("none" | "longrope" | "su" | "yarn") => (short, long),
                Some(kind) => {
                    let what = format!("rope scaling {kind} with rope_factors_long.weight");
                    return Err(header.unsupported(&what, "supported: none, longrope"));
                }
            },
            (None, None) => match kind {
                None | Some("none") => {
                    self.refuse_attention_factor()?;
                    return Ok(Value::Null);
                }
                Some(kind) => {
                    let what = format!("rope scaling {kind} without rope_factors_long.weight");
                    return Err(header.unsupported(&what, "supported: none, longrope"));
                }
            },
            _ => {
                let what = "rope_factors_short.weight and rope_factors_long.weight: one is missing";
                return Err(header.malformed(what.to_owned()));
            }
        };
        let original = self.required("rope.scaling.original_context_length")?;
        let mut scaling = json!({
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        });
        // The file has the factor in f32. Where it is the one that follows from the contexts, that one counts.
        let (context, original) = (self.required("context_length")? as f64, original as f64);
        let derived =
            if context > original { (1.0 + (context / original).ln() / original.ln()).sqrt() } else { 1.0 };
        let given = self.number("rope.scaling.attn_factor")?.unwrap_or(1.0);
        if (given - derived).abs() > 1e-6 * derived {
            scaling["attention_factor"] = json!(given);
        }
        Ok(scaling)
    }

    /// A tensor of any file and its bytes, by its name in the file.
    fn tensor(&self, name: &str) -> Option<(&'a GgufTensor<'a>, &'a [u8])> {
        self.headers
            .iter()
            .find_map(|header| header.tensor(name).map(|tensor| (tensor, header.bytes(tensor))))
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    fn size(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.header.size(&self.key(key))
    }

    fn number(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.header.number(&self.key(key))
    }

    fn required(&self, key: &str) -> Result<usize, ModelError> {
        self.size(key)?.ok_or_else(|| self.absent(key))
    }

    fn absent(&self, key: &str) -> ModelError {
        self.header.malformed(format!("{} is absent", self.key(key)))
    }
}

/// Architectures that are computed, for refusals.
fn supported() -> String {
    format!("supported: {}", ARCHITECTURES.map(|(name, _)| name).join(", "))
}
