//! The computation that GGUF metadata describes, as the fields of `config.json`, and the checkpoint's tensor names.
//!
//! The fields pass the same checks as those of a Hugging Face checkpoint. A value that would change the computation and
//! has no field is refused by name. So is every tensor without a place in the model.

use serde_json::{Value, json};

use super::header::{GgufHeader, GgufTensor};
use crate::model::ModelError;

/// The key of the architecture's name, which is the prefix of its other keys.
const ARCHITECTURE_KEY: &str = "general.architecture";
/// Architectures that are computed, for refusals.
const SUPPORTED: &str = "supported: llama, qwen2, qwen3";
/// Layers of a file: more than any model has. The bound of `config.json` is checked later.
const MAX_LAYERS: usize = 1 << 16;
/// Keys that change the computation, below the architecture's prefix, and the value without an effect.
const NOT_COMPUTED: [(&str, f64); 13] = [
    ("expert_count", 0.0),
    ("logit_scale", 1.0),
    ("residual_scale", 1.0),
    ("embedding_scale", 1.0),
    ("attn_logit_softcapping", 0.0),
    ("final_logit_softcapping", 0.0),
    ("attention.scale", 0.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("attention.temperature_scale", 0.0),
    ("rope.scaling.attn_factor", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
];

/// Architecture of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GgufFamily {
    /// Llama 1 to 3 and Mistral.
    Llama,
    Qwen2,
    Qwen3,
}

/// The architecture's metadata.
#[derive(Debug)]
pub(super) struct GgufModel<'a> {
    /// The files' headers. The first one contains the metadata.
    headers: &'a [GgufHeader<'a>],
    header: &'a GgufHeader<'a>,
    name: &'a str,
    family: GgufFamily,
    heads: usize,
    kv_heads: usize,
}

/// The place of a tensor in the model.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TensorPlace {
    /// Its name in a Hugging Face checkpoint.
    pub(super) name: String,
    /// Heads whose rows llama.cpp has reordered.
    pub(super) interleaved_heads: Option<usize>,
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
        let family = match name {
            "llama" => GgufFamily::Llama,
            "qwen2" => GgufFamily::Qwen2,
            "qwen3" => GgufFamily::Qwen3,
            other => return Err(header.unsupported(&format!("architecture {other}"), SUPPORTED)),
        };
        let mut model = Self { headers, header, name, family, heads: 0, kv_heads: 0 };
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
        for (key, wanted) in [("attention.value_length", head_dim), ("rope.dimension_count", head_dim)] {
            if let Some(other) = self.size(key)?.filter(|other| *other != wanted) {
                let what = format!("{}.{key} {other} with heads of {head_dim}", self.name);
                return Err(header.unsupported(&what, "supported: equal sizes"));
            }
        }
        let embedding = self.tensor("token_embd.weight");
        let vocab = embedding.and_then(|(tensor, _)| tensor.shape.first().copied());
        let vocab = vocab.ok_or_else(|| header.malformed("tensor token_embd.weight is missing".into()))?;
        let theta = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        let epsilon = "attention.layer_norm_rms_epsilon";
        let epsilon = self.number(epsilon)?.ok_or_else(|| self.absent(epsilon))?;
        let architecture = match self.family {
            GgufFamily::Llama => "LlamaForCausalLM",
            GgufFamily::Qwen2 => "Qwen2ForCausalLM",
            GgufFamily::Qwen3 => "Qwen3ForCausalLM",
        };
        let has = |name: &str| self.tensor(name).is_some();
        Ok(json!({
            "architectures": [architecture],
            "hidden_size": hidden,
            "intermediate_size": self.required("feed_forward_length")?,
            "num_hidden_layers": self.required("block_count")?,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "max_position_embeddings": self.required("context_length")?,
            "rms_norm_eps": epsilon,
            "rope_theta": theta,
            "rope_scaling": self.rope_scaling(theta, head_dim)?,
            "tie_word_embeddings": !has("output.weight"),
            // Qwen2's biases of q, k and v are part of the family.
            "attention_bias": self.family != GgufFamily::Qwen2 && has("blk.0.attn_q.bias"),
            "mlp_bias": has("blk.0.ffn_gate.bias"),
            "bos_token_id": bos,
            "eos_token_id": ends,
        }))
    }

    /// The place of a tensor. `None` for one that is part of the configuration.
    ///
    /// # Errors
    /// [`ModelError::Unsupported`] for a tensor that the model does not have.
    pub(super) fn place(&self, tensor: &GgufTensor<'_>) -> Result<Option<TensorPlace>, ModelError> {
        let plain = |name: &str| Ok(Some(TensorPlace { name: name.to_owned(), interleaved_heads: None }));
        match tensor.name {
            "token_embd.weight" => return plain("model.embed_tokens.weight"),
            "output_norm.weight" => return plain("model.norm.weight"),
            "output.weight" => return plain("lm_head.weight"),
            // `config` compares it with the frequencies that it describes.
            "rope_freqs.weight" => return Ok(None),
            _ => {}
        }
        let layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let layer = layer.and_then(|(layer, part)| {
            let number = layer.parse::<usize>().ok().filter(|number| *number < MAX_LAYERS)?;
            // One spelling of each number, so that two tensors cannot have one place.
            (number.to_string() == layer).then_some((number, part))
        });
        let part = layer.and_then(|(number, part)| Some((number, part, self.part(part)?)));
        let Some((number, part, place)) = part else {
            let what = format!("tensor {} of architecture {}", tensor.name, self.name);
            return Err(self.header.unsupported(&what, "supported: the tensors of a dense decoder"));
        };
        let interleaved_heads = match (self.family, part.split('.').next()) {
            (GgufFamily::Llama, Some("attn_q")) => Some(self.heads),
            (GgufFamily::Llama, Some("attn_k")) => Some(self.kv_heads),
            _ => None,
        };
        Ok(Some(TensorPlace { name: format!("model.layers.{number}.{place}"), interleaved_heads }))
    }

    /// The name of a layer's tensor in the checkpoint.
    fn part(&self, part: &str) -> Option<&'static str> {
        let with_norms = self.family == GgufFamily::Qwen3;
        match part {
            "attn_norm.weight" => Some("input_layernorm.weight"),
            "attn_q.weight" => Some("self_attn.q_proj.weight"),
            "attn_q.bias" => Some("self_attn.q_proj.bias"),
            "attn_k.weight" => Some("self_attn.k_proj.weight"),
            "attn_k.bias" => Some("self_attn.k_proj.bias"),
            "attn_v.weight" => Some("self_attn.v_proj.weight"),
            "attn_v.bias" => Some("self_attn.v_proj.bias"),
            "attn_output.weight" => Some("self_attn.o_proj.weight"),
            // Qwen2 has no such bias, and a configuration cannot describe one.
            "attn_output.bias" if self.family != GgufFamily::Qwen2 => Some("self_attn.o_proj.bias"),
            "attn_q_norm.weight" if with_norms => Some("self_attn.q_norm.weight"),
            "attn_k_norm.weight" if with_norms => Some("self_attn.k_norm.weight"),
            "ffn_norm.weight" => Some("post_attention_layernorm.weight"),
            "ffn_gate.weight" => Some("mlp.gate_proj.weight"),
            "ffn_up.weight" => Some("mlp.up_proj.weight"),
            "ffn_down.weight" => Some("mlp.down_proj.weight"),
            "ffn_gate.bias" if self.family == GgufFamily::Llama => Some("mlp.gate_proj.bias"),
            "ffn_up.bias" if self.family == GgufFamily::Llama => Some("mlp.up_proj.bias"),
            "ffn_down.bias" if self.family == GgufFamily::Llama => Some("mlp.down_proj.bias"),
            _ => None,
        }
    }

    fn refuse_what_is_not_computed(&self) -> Result<(), ModelError> {
        for (key, harmless) in NOT_COMPUTED {
            if let Some(value) = self.number(key)?.filter(|value| *value != harmless) {
                let what = format!("{}.{key} {value}", self.name);
                return Err(self.header.unsupported(&what, SUPPORTED));
            }
        }
        let key = self.key("attention.causal");
        if self.header.flag(&key)? == Some(false) {
            return Err(self.header.unsupported(&format!("{key} false"), "supported: causal attention"));
        }
        // A window as long as the context is none.
        let window = self.size("attention.sliding_window")?.filter(|window| *window > 0);
        let context = self.size("context_length")?.unwrap_or(0);
        if let Some(window) = window.filter(|window| *window < context) {
            let what = format!("{}.attention.sliding_window {window}", self.name);
            return Err(self.header.unsupported(&what, "supported: full attention"));
        }
        Ok(())
    }

    /// `rope_scaling`, or null.
    fn rope_scaling(&self, theta: f64, head_dim: usize) -> Result<Value, ModelError> {
        let header = self.header;
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
