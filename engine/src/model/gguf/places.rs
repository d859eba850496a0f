//! The places of a file's tensors in the model, by the names of its family.

use crate::model::spec::{ExpertParts, FlagRule, LAYERS, ModelSpec};

/// What the converter of llama.cpp has changed in a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::model) enum GgufChange {
    /// Nothing.
    None,
    /// The rows of so many heads are in another order.
    HeadRows(usize),
    /// This number was added to each value.
    Raised(f32),
}

/// The part of a layer that a tensor is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum PartPlace {
    /// A matrix or a bias.
    Matrix,
    /// A matrix or a bias with the rows of so many heads, in the order of llama.cpp.
    Heads(usize),
    /// A norm, whose weights the file contains with this number added.
    Norm(f32),
    /// The matrices of all experts of a layer.
    Experts {
        /// The name of the matrix, behind the number of the expert.
        matrix: &'static str,
    },
}

/// The place of a tensor in the model.
#[derive(Debug, PartialEq)]
pub(super) struct TensorPlace {
    /// Its name in a Hugging Face checkpoint. Of experts: the name before their number.
    pub(super) name: String,
    /// Which part it is.
    pub(super) part: PartPlace,
}

impl TensorPlace {
    /// A weight outside the layers.
    pub(super) fn of(name: &str, part: PartPlace) -> Self {
        Self { name: format!("{name}.weight"), part }
    }

    /// The place of a layer's tensor. `None` for one that the family does not have. `interleaved`: heads of q and of k, if
    /// their rows are in llama.cpp's order.
    pub(super) fn in_layer(
        spec: &ModelSpec,
        layer: usize,
        part: &str,
        interleaved: Option<[usize; 2]>,
    ) -> Option<Self> {
        let prefix = format!("{LAYERS}.{layer}");
        if let Some(kind) = part.strip_suffix("_exps.weight") {
            let rule = spec.experts.as_ref()?;
            let ExpertParts::Apart(parts) = rule.parts else { return None };
            let at = ["ffn_gate", "ffn_up", "ffn_down"].iter().position(|known| *known == kind)?;
            let name = format!("{prefix}.{}", rule.prefix);
            return Some(Self { name, part: PartPlace::Experts { matrix: parts[at] } });
        }
        let (stem, suffix) = part.rsplit_once('.')?;
        let is_bias = match suffix {
            "weight" => false,
            "bias" => true,
            _ => return None,
        };
        let (name, place) = part_of(spec, stem, is_bias, interleaved)?;
        Some(Self { name: format!("{prefix}.{name}.{suffix}"), part: place })
    }
}

/// The name and kind of a part of a layer, from its name in a file.
fn part_of(
    spec: &ModelSpec,
    stem: &str,
    is_bias: bool,
    interleaved: Option<[usize; 2]>,
) -> Option<(&'static str, PartPlace)> {
    let (names, biases) = (&spec.tensors, &spec.biases);
    let norm = PartPlace::Norm(spec.norm_offset);
    let heads = |at: usize| interleaved.map_or(PartPlace::Matrix, |heads| PartPlace::Heads(heads[at]));
    // A family has each tensor either alone or in one with others.
    let one_of = |list: &'static [&'static str], len: usize, at: usize| (list.len() == len).then(|| list[at]);
    let (name, place, has_bias) = match stem {
        "attn_norm" => (Some(names.attention_norm), norm, FlagRule::Never),
        "attn_q" => (one_of(names.qkv, 3, 0), heads(0), biases.qkv),
        "attn_k" => (one_of(names.qkv, 3, 1), heads(1), biases.qkv),
        "attn_v" => (one_of(names.qkv, 3, 2), PartPlace::Matrix, biases.qkv),
        "attn_qkv" => (one_of(names.qkv, 1, 0), PartPlace::Matrix, biases.qkv),
        "attn_q_norm" => (names.qk_norm.map(|both| both[0]), norm, FlagRule::Never),
        "attn_k_norm" => (names.qk_norm.map(|both| both[1]), norm, FlagRule::Never),
        "attn_output" => (Some(names.output), PartPlace::Matrix, biases.output),
        "post_attention_norm" => (names.attention_post_norm, norm, FlagRule::Never),
        "ffn_norm" => (Some(names.mlp_norm), norm, FlagRule::Never),
        "post_ffw_norm" => (names.mlp_post_norm, norm, FlagRule::Never),
        "ffn_gate_inp" => (spec.experts.as_ref().map(|rule| rule.router), PartPlace::Matrix, FlagRule::Never),
        "ffn_gate" => (one_of(names.gate_up, 2, 0), PartPlace::Matrix, biases.mlp),
        // With both projections in one tensor, it has the name of the second.
        "ffn_up" => {
            let name = one_of(names.gate_up, 2, 1).or(one_of(names.gate_up, 1, 0));
            (name, PartPlace::Matrix, biases.mlp)
        }
        "ffn_down" => (Some(names.down), PartPlace::Matrix, biases.mlp),
        _ => return None,
    };
    let name = name.filter(|_| !is_bias || has_bias != FlagRule::Never)?;
    Some((name, place))
}
