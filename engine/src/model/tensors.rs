//! The tensors of a layer, from the family's names and the configuration's sizes. Every device walks this list.

use super::ModelError;
use super::config::{ExpertConfig, ModelConfig};
use super::spec::{ExpertParts, LAYERS};

/// Rows of one tensor. A tensor with the rows of several projections has one value of this type for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRows {
    /// Name of the tensor.
    pub name: String,
    /// Rows of the whole tensor.
    pub total: usize,
    /// The first row of this part.
    pub first: usize,
    /// Rows of this part.
    pub count: usize,
}

/// The tensors of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTensors {
    /// The norm before attention.
    pub attention_norm: String,
    /// q, k and v.
    pub qkv: [TensorRows; 3],
    /// Their biases.
    pub qkv_bias: Option<[TensorRows; 3]>,
    /// Norms of each head of q and k.
    pub qk_norm: Option<[String; 2]>,
    /// Attention sinks of the heads of q.
    pub sinks: Option<String>,
    /// The output projection of attention.
    pub output: String,
    /// Its bias.
    pub output_bias: Option<String>,
    /// The norm of attention's output before it is added.
    pub attention_post_norm: Option<String>,
    /// The norm before the feed-forward layer.
    pub mlp_norm: String,
    /// The feed-forward layer.
    pub mlp: MlpTensors,
    /// The norm of its output before it is added.
    pub mlp_post_norm: Option<String>,
}

/// A feed-forward layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MlpTensors {
    /// One network for every token.
    Dense(DenseTensors),
    /// A router, and the networks of the experts.
    Experts {
        /// The matrix of the router.
        router: String,
        /// One network for each expert.
        experts: Vec<DenseTensors>,
    },
    /// The same with tensors that all experts share.
    Fused(FusedExperts),
}

/// A router and experts with one tensor for each projection, `[experts, inputs, outputs]`, and biases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FusedExperts {
    /// The matrix of the router.
    pub router: String,
    /// Its bias.
    pub router_bias: String,
    /// Gate in the even outputs, up in the odd ones.
    pub gate_up: String,
    /// Their biases, `[experts, outputs]`.
    pub gate_up_bias: String,
    /// The last projection.
    pub down: String,
    /// Its biases, `[experts, outputs]`.
    pub down_bias: String,
    /// Experts.
    pub count: usize,
    /// Width between the projections of an expert.
    pub intermediate: usize,
}

/// Outputs of one expert in a tensor of all experts: `first`, `first + step` and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertOutputs {
    /// The expert.
    pub expert: usize,
    /// Inputs of the matrix; 1 for biases.
    pub inputs: usize,
    /// Outputs of the matrix.
    pub outputs: usize,
    /// The first output of this part.
    pub first: usize,
    /// Distance from one to the next.
    pub step: usize,
}

impl ExpertOutputs {
    /// Outputs of this part.
    #[must_use]
    pub fn count(&self) -> usize {
        (self.outputs - self.first).div_ceil(self.step)
    }
}

/// Where the elements of a tensor are among its stored values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ElementOrder {
    /// One after the other.
    Sequential,
    /// In rows of `columns` elements.
    Strided {
        /// Elements of a row.
        columns: usize,
        /// Distance from a row to the next.
        row: usize,
        /// Distance from a column to the next.
        column: usize,
    },
}

impl ElementOrder {
    /// Reads the elements from `start` on into `out`. `read(at, part)` reads the stored values from `at` on.
    pub(super) fn each_run<T>(self, start: usize, out: &mut [T], read: impl Fn(usize, &mut [T])) {
        let Self::Strided { columns, row, column } = self else { return read(start, out) };
        let (mut at, mut rest) = (start, out);
        while !rest.is_empty() {
            let (in_row, in_column) = (at / columns, at % columns);
            let side_by_side = if column == 1 { columns - in_column } else { 1 };
            let (part, later) = rest.split_at_mut(side_by_side.min(rest.len()));
            read(in_row * row + in_column * column, part);
            at += part.len();
            rest = later;
        }
    }
}

/// One feed-forward network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseTensors {
    /// Width between its projections.
    pub intermediate: usize,
    /// Gate and up.
    pub gate_up: [TensorRows; 2],
    /// Their biases.
    pub gate_up_bias: Option<[TensorRows; 2]>,
    /// The last projection.
    pub down: String,
    /// Its bias.
    pub down_bias: Option<String>,
}

/// A visitor of tensors: it gets the name and the shape of each.
type TensorVisitor<'a> = dyn FnMut(&str, &[usize]) -> Result<(), ModelError> + 'a;

impl LayerTensors {
    fn visit(&self, config: &ModelConfig, visit: &mut TensorVisitor<'_>) -> Result<(), ModelError> {
        let hidden = config.hidden;
        for part in &self.qkv {
            visit(&part.name, &[part.total, hidden])?;
        }
        for part in self.qkv_bias.iter().flatten() {
            visit(&part.name, &[part.total])?;
        }
        for norm in self.qk_norm.iter().flatten() {
            visit(norm, &[config.head_dim])?;
        }
        if let Some(sinks) = &self.sinks {
            visit(sinks, &[config.heads])?;
        }
        visit(&self.output, &[hidden, config.query_width()])?;
        let norms = [Some(&self.attention_norm), Some(&self.mlp_norm)];
        let optional = [&self.output_bias, &self.attention_post_norm, &self.mlp_post_norm];
        for vector in norms.into_iter().chain(optional.map(Option::as_ref)).flatten() {
            visit(vector, &[hidden])?;
        }
        match &self.mlp {
            MlpTensors::Dense(dense) => dense.visit(hidden, visit),
            MlpTensors::Experts { router, experts } => {
                visit(router, &[experts.len(), hidden])?;
                experts.iter().try_for_each(|expert| expert.visit(hidden, visit))
            }
            MlpTensors::Fused(fused) => fused.visit(hidden, visit),
        }
    }
}

impl FusedExperts {
    fn visit(&self, hidden: usize, visit: &mut TensorVisitor<'_>) -> Result<(), ModelError> {
        let (count, width) = (self.count, self.intermediate);
        visit(&self.router, &[count, hidden])?;
        visit(&self.router_bias, &[count])?;
        visit(&self.gate_up, &[count, hidden, 2 * width])?;
        visit(&self.gate_up_bias, &[count, 2 * width])?;
        visit(&self.down, &[count, width, hidden])?;
        visit(&self.down_bias, &[count, hidden])
    }
}

impl DenseTensors {
    fn visit(&self, hidden: usize, visit: &mut TensorVisitor<'_>) -> Result<(), ModelError> {
        for part in &self.gate_up {
            visit(&part.name, &[part.total, hidden])?;
        }
        for part in self.gate_up_bias.iter().flatten() {
            visit(&part.name, &[part.total])?;
        }
        visit(&self.down, &[hidden, self.intermediate])?;
        self.down_bias.iter().try_for_each(|bias| visit(bias, &[hidden]))
    }
}

impl ModelConfig {
    /// Visits every tensor that a device reads: its name and shape. One with the rows of several projections is visited
    /// once for each. Ends with the visitor's first error.
    pub(super) fn tensor_shapes(&self, visit: &mut TensorVisitor<'_>) -> Result<(), ModelError> {
        let (names, prefix) = (&self.spec.tensors, self.spec.prefix());
        let weight = |part: &str| format!("{prefix}{part}.weight");
        visit(&weight(names.embedding), &[self.vocab, self.hidden])?;
        if !self.tied {
            visit(&weight(names.head), &[self.vocab, self.hidden])?;
        }
        visit(&weight(names.final_norm), &[self.hidden])?;
        (0..self.layers).try_for_each(|layer| self.layer_tensors(layer).visit(self, visit))
    }

    /// The tensors of layer `layer`.
    #[must_use]
    pub fn layer_tensors(&self, layer: usize) -> LayerTensors {
        let (names, prefix) = (&self.spec.tensors, self.spec.prefix());
        let name = |part: &str, kind: &str| format!("{prefix}{LAYERS}.{layer}.{part}.{kind}");
        let weight = |part: &str| name(part, "weight");
        let (query, kv) = (self.query_width(), self.kv_width());
        let of_qkv = |kind: &str| parts(names.qkv, [query, kv, kv], |part| name(part, kind));
        LayerTensors {
            attention_norm: weight(names.attention_norm),
            qkv: of_qkv("weight"),
            qkv_bias: self.biases.qkv.then(|| of_qkv("bias")),
            qk_norm: names.qk_norm.map(|both| both.map(weight)),
            sinks: self.spec.scales.sinks.map(|sinks| format!("{prefix}{LAYERS}.{layer}.{sinks}")),
            output: weight(names.output),
            output_bias: self.biases.output.then(|| name(names.output, "bias")),
            attention_post_norm: names.attention_post_norm.map(weight),
            mlp_norm: weight(names.mlp_norm),
            mlp: match self.experts_of(layer) {
                Some(experts) => self.expert_tensors(layer, experts),
                None => MlpTensors::Dense(self.dense_tensors(layer)),
            },
            mlp_post_norm: names.mlp_post_norm.map(weight),
        }
    }

    fn dense_tensors(&self, layer: usize) -> DenseTensors {
        let (names, prefix) = (&self.spec.tensors, self.spec.prefix());
        let name = |part: &str, kind: &str| format!("{prefix}{LAYERS}.{layer}.{part}.{kind}");
        let of_both = |kind: &str| parts(names.gate_up, [self.intermediate; 2], |part| name(part, kind));
        DenseTensors {
            intermediate: self.intermediate,
            gate_up: of_both("weight"),
            gate_up_bias: self.biases.mlp.then(|| of_both("bias")),
            down: name(names.down, "weight"),
            down_bias: self.biases.mlp.then(|| name(names.down, "bias")),
        }
    }

    fn expert_tensors(&self, layer: usize, experts: &ExpertConfig) -> MlpTensors {
        let (rule, prefix) = (experts.rule, self.spec.prefix());
        let router = |kind: &str| format!("{prefix}{LAYERS}.{layer}.{}.{kind}", rule.router);
        let [gate, up, down] = match rule.parts {
            ExpertParts::Apart(parts) => parts,
            ExpertParts::Fused(parts) => {
                let [gate_up, down] =
                    parts.map(|part| format!("{prefix}{LAYERS}.{layer}.{}.{part}", rule.prefix));
                return MlpTensors::Fused(FusedExperts {
                    router: router("weight"),
                    router_bias: router("bias"),
                    gate_up_bias: format!("{gate_up}_bias"),
                    gate_up,
                    down_bias: format!("{down}_bias"),
                    down,
                    count: experts.count,
                    intermediate: experts.intermediate,
                });
            }
        };
        let of_expert = |expert: usize| {
            let name =
                |part: &str| format!("{prefix}{LAYERS}.{layer}.{}.{expert}.{part}.weight", rule.prefix);
            DenseTensors {
                intermediate: experts.intermediate,
                gate_up: parts(&[gate, up], [experts.intermediate; 2], name),
                gate_up_bias: None,
                down: name(down),
                down_bias: None,
            }
        };
        MlpTensors::Experts { router: router("weight"), experts: (0..experts.count).map(of_expert).collect() }
    }
}

/// The rows of projections with a tensor each, or with one tensor for all.
fn parts<const N: usize>(
    names: &[&str],
    counts: [usize; N],
    full_name: impl Fn(&str) -> String,
) -> [TensorRows; N] {
    let total: usize = counts.iter().sum();
    std::array::from_fn(|part| {
        let count = counts[part];
        match names {
            [fused] => {
                TensorRows { name: full_name(fused), total, first: counts[..part].iter().sum(), count }
            }
            each => TensorRows { name: full_name(each[part]), total: count, first: 0, count },
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::cpu::{CpuExecutor, CpuOptions};
    use crate::model::ModelFiles;
    use crate::model::generation::GenerationDefaults;
    use crate::model::spec::ModelSpec;
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;
    use serde_json::json;

    fn config(architecture: &str) -> ModelConfig {
        let mut config = json!({
            "architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100
        });
        if ModelSpec::named(architecture).is_some_and(|spec| spec.experts.is_some()) {
            config["num_experts"] = json!(4);
            config["num_local_experts"] = json!(4);
            config["num_experts_per_tok"] = json!(2);
            config["moe_intermediate_size"] = json!(40);
            config["mlp_only_layers"] = json!([1]);
        }
        let config = ModelConfig::parse(config.to_string().as_bytes(), GenerationDefaults::default());
        config.expect("a sound configuration")
    }

    fn tensors(architecture: &str, layer: usize) -> LayerTensors {
        config(architecture).layer_tensors(layer)
    }

    /// Loads a checkpoint of these tensors, all zero. Returns the calls of the progress, and the error.
    fn load(config: &ModelConfig, tensors: &[(String, Vec<usize>)]) -> (usize, Option<String>) {
        let folder = tempfile::tempdir().expect("a folder");
        let zeros = vec![0; 1 << 17];
        let view = |(name, shape): &(String, Vec<usize>)| {
            let bytes = &zeros[..shape.iter().product::<usize>() * 2];
            (name.clone(), TensorView::new(Dtype::F16, shape.clone(), bytes).expect("its bytes"))
        };
        let views: Vec<(String, TensorView<'_>)> = tensors.iter().map(view).collect();
        let file = safetensors::serialize(views, None).expect("a file");
        std::fs::write(folder.path().join("model.safetensors"), file).expect("written");
        let options = CpuOptions { blocks: 4, threads: 1, ..CpuOptions::default() };
        let mut calls = 0;
        let files = ModelFiles::Dir(folder.path().into());
        let loaded = CpuExecutor::load(&files, config, &options, &mut |_| calls += 1);
        let error = loaded.err().map(|error| error.to_string());
        (calls, error)
    }

    #[test]
    fn no_weight_is_read_of_a_checkpoint_that_lacks_a_later_one() {
        for architecture in [
            "LlamaForCausalLM",
            "Phi3ForCausalLM",
            "Gemma3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "GptOssForCausalLM",
        ] {
            let config = config(architecture);
            let mut all = Vec::new();
            let mut collect = |name: &str, shape: &[usize]| {
                all.push((name.to_owned(), shape.to_vec()));
                Ok(())
            };
            config.tensor_shapes(&mut collect).expect("no error of its own");
            all.sort();
            all.dedup();
            let (calls, error) = load(&config, &all);
            assert!(calls > 0 && error.is_none(), "{architecture}: {error:?}");
            let at = all.iter().rposition(|(name, _)| name.contains("layers.2.mlp")).expect("a layer");
            let mut wrong = all.clone();
            wrong[at].1.push(1);
            all.remove(at);
            for (tensors, words) in [(all, "is missing"), (wrong, "has shape")] {
                let (calls, error) = load(&config, &tensors);
                let error = error.expect(words);
                assert!(error.contains("layers.2.mlp") && error.contains(words), "{architecture}: {error}");
                assert_eq!(calls, 0, "{architecture}");
            }
        }
    }

    fn rows(part: &TensorRows) -> (&str, usize, usize, usize) {
        (&part.name, part.total, part.first, part.count)
    }

    #[test]
    fn a_fused_tensor_has_the_rows_of_all_projections_in_order() {
        let fused = tensors("Phi3ForCausalLM", 2);
        let name = "model.layers.2.self_attn.qkv_proj.weight";
        assert_eq!(
            fused.qkv.each_ref().map(rows),
            [(name, 128, 0, 64), (name, 128, 64, 32), (name, 128, 96, 32)]
        );
        let MlpTensors::Dense(mlp) = fused.mlp else { panic!("no experts") };
        let name = "model.layers.2.mlp.gate_up_proj.weight";
        assert_eq!(mlp.gate_up.each_ref().map(rows), [(name, 192, 0, 96), (name, 192, 96, 96)]);
        let apart = tensors("LlamaForCausalLM", 0);
        assert_eq!(rows(&apart.qkv[2]), ("model.layers.0.self_attn.v_proj.weight", 32, 0, 32));
    }

    #[test]
    fn each_expert_has_tensors_of_its_own() {
        let MlpTensors::Experts { router, experts } = tensors("Qwen3MoeForCausalLM", 0).mlp else {
            panic!("experts")
        };
        assert_eq!((router.as_str(), experts.len()), ("model.layers.0.mlp.gate.weight", 4));
        assert_eq!(rows(&experts[3].gate_up[1]), ("model.layers.0.mlp.experts.3.up_proj.weight", 40, 0, 40));
        assert!(matches!(tensors("Qwen3MoeForCausalLM", 1).mlp, MlpTensors::Dense(_)));
        let MlpTensors::Experts { router, experts } = tensors("MixtralForCausalLM", 1).mlp else {
            panic!("experts")
        };
        assert_eq!(router, "model.layers.1.block_sparse_moe.gate.weight");
        assert_eq!(experts[2].down, "model.layers.1.block_sparse_moe.experts.2.w2.weight");
        assert_eq!(experts[2].intermediate, 96);
    }

    #[test]
    fn the_experts_of_gpt_oss_share_tensors_and_its_heads_have_sinks() {
        let layer = tensors("GptOssForCausalLM", 1);
        assert_eq!(layer.sinks.as_deref(), Some("model.layers.1.self_attn.sinks"));
        assert_eq!(layer.output_bias.as_deref(), Some("model.layers.1.self_attn.o_proj.bias"));
        let MlpTensors::Fused(fused) = &layer.mlp else { panic!("fused experts") };
        assert_eq!(fused.router_bias, "model.layers.1.mlp.router.bias");
        assert_eq!(fused.gate_up_bias, "model.layers.1.mlp.experts.gate_up_proj_bias");
        let mut shapes = Vec::new();
        let mut collect = |name: &str, shape: &[usize]| {
            shapes.push((name.to_owned(), shape.to_vec()));
            Ok(())
        };
        layer.visit(&config("GptOssForCausalLM"), &mut collect).expect("no error of its own");
        for (name, shape) in [
            ("self_attn.sinks", vec![4]),
            ("self_attn.k_proj.bias", vec![32]),
            ("mlp.router.weight", vec![4, 64]),
            ("mlp.experts.gate_up_proj", vec![4, 64, 192]),
            ("mlp.experts.gate_up_proj_bias", vec![4, 192]),
            ("mlp.experts.down_proj", vec![4, 96, 64]),
            ("mlp.experts.down_proj_bias", vec![4, 64]),
        ] {
            assert!(shapes.contains(&(format!("model.layers.1.{name}"), shape)), "{name}: {shapes:?}");
        }
        assert_eq!(tensors("LlamaForCausalLM", 0).sinks, None);
    }

    #[test]
    fn norms_stand_where_the_family_has_them() {
        let gemma = tensors("Gemma2ForCausalLM", 0);
        let post = "model.layers.0.post_attention_layernorm.weight";
        assert_eq!(gemma.attention_post_norm.as_deref(), Some(post));
        assert_eq!(gemma.mlp_norm, "model.layers.0.pre_feedforward_layernorm.weight");
        assert_eq!(gemma.qk_norm, None);
        let llama = tensors("LlamaForCausalLM", 0);
        assert_eq!((llama.mlp_norm.as_str(), llama.attention_post_norm), (post, None));
    }
}
