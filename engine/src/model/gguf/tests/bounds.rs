//! GGUF files that describe more than they contain, or a computation that is not theirs.

use std::sync::Arc;

use super::*;

/// The tensors outside the layers, and the projection of queries of the first of so many layers.
fn of_layers(architecture: &str, layers: u32) -> GgufSketch {
    metadata_of(architecture, layers)
        .floats("token_embd.weight", &[8, 4], 0.0)
        .floats("output_norm.weight", &[8], 100.0)
        .floats("blk.0.attn_q.weight", &[8, 8], 0.0)
}

/// A `llama` of one layer with all tensors of attention.
fn with_attention() -> GgufSketch {
    model("llama")
        .floats("blk.0.attn_norm.weight", &[8], 1.0)
        .floats("blk.0.attn_k.weight", &[8, 4], 0.0)
        .floats("blk.0.attn_v.weight", &[8, 4], 0.0)
        .floats("blk.0.attn_output.weight", &[8, 8], 0.0)
        .floats("blk.0.ffn_norm.weight", &[8], 1.0)
}

/// The same with a feed-forward layer: complete.
fn dense() -> GgufSketch {
    with_attention()
        .floats("blk.0.ffn_gate.weight", &[8, 8], 0.0)
        .floats("blk.0.ffn_up.weight", &[8, 8], 0.0)
        .floats("blk.0.ffn_down.weight", &[8, 8], 0.0)
}

/// The same with two experts: complete.
fn with_experts() -> GgufSketch {
    with_attention()
        .size("llama.expert_count", 2)
        .size("llama.expert_used_count", 1)
        .floats("blk.0.ffn_gate_inp.weight", &[8, 2], 0.0)
        .floats("blk.0.ffn_gate_exps.weight", &[8, 8, 2], 0.0)
        .floats("blk.0.ffn_up_exps.weight", &[8, 8, 2], 0.0)
        .floats("blk.0.ffn_down_exps.weight", &[8, 8, 2], 0.0)
}

fn files(sketch: &GgufSketch) -> ModelFiles {
    ModelFiles::Gguf(Arc::new(opened(sketch).expect("a model")))
}

fn config(sketch: &GgufSketch) -> Value {
    opened(sketch).expect("a model").config().expect("a configuration")
}

/// Compares the tensors of a file with its configuration.
fn checked(sketch: &GgufSketch) -> Result<(), String> {
    let files = files(sketch);
    let config = ModelConfig::read(&files).expect("a configuration");
    Weights::open(&files).expect("weights").check(&config).map_err(|error| error.to_string())
}

#[test]
fn a_small_file_does_not_describe_a_large_model() {
    refused(&of_layers("llama", 1025), "llama.block_count 1025 is more than 1024");
    refused(&of_layers("llama", 2).floats("blk.2.attn_k.weight", &[8, 4], 0.0), "blk.2.attn_k.weight");
    opened(&of_layers("llama", 2).floats("blk.1.attn_k.weight", &[8, 4], 0.0)).expect("its last layer");
    let shared = model("llama").described("blk.0.attn_k.weight", &[8, 4], 0, 0);
    refused(&shared, "tensors blk.0.attn_k.weight and token_embd.weight share bytes");
    refused(&model("llama").described("blk.0.attn_k.weight", &[8, 4], 0, 32), "share bytes");

    // One value for each matrix of an expert.
    let experts = |layers: u32| {
        let mut sketch = of_layers("qwen3moe", layers)
            .size("qwen3moe.expert_count", 1024)
            .size("qwen3moe.expert_used_count", 1);
        for layer in 0..layers {
            for part in ["gate", "up", "down"] {
                sketch = sketch.floats(&format!("blk.{layer}.ffn_{part}_exps.weight"), &[1, 1, 1024], 0.0);
            }
        }
        sketch
    };
    let most = opened(&experts(85)).expect("as many as are allowed").entries().expect("tensors");
    assert_eq!(most.len(), 3 + 85 * 3 * 1024);
    refused(&experts(86), "has more than 262144 matrices and vectors");
}

#[test]
fn a_tensor_that_is_not_read_is_refused() {
    assert_eq!((checked(&dense()), checked(&with_experts())), (Ok(()), Ok(())));
    let beside = with_experts().floats("blk.0.ffn_up.weight", &[8, 8], 0.0);
    let error = checked(&beside).expect_err("a layer beside the experts");
    assert!(error.contains("model.layers.0.mlp.up_proj.weight beside those of the configuration"), "{error}");
    // A part of the biases that the architecture has.
    for (name, missing) in [
        ("blk.0.attn_output.bias", "self_attn.q_proj.bias is missing"),
        ("blk.0.attn_v.bias", "self_attn.q_proj.bias is missing"),
        ("blk.0.ffn_up.bias", "mlp.gate_proj.bias is missing"),
    ] {
        let width = if name.contains("attn_v") { 4 } else { 8 };
        let error = checked(&dense().floats(name, &[width], 0.0)).expect_err(name);
        assert!(error.contains(missing), "{name}: {error}");
    }
    let all = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let with_all = all.iter().fold(dense(), |sketch, part| {
        let width = if matches!(*part, "attn_k" | "attn_v") { 4 } else { 8 };
        sketch.floats(&format!("blk.0.{part}.bias"), &[width], 0.0)
    });
    assert_eq!(checked(&with_all), Ok(()));
}

#[test]
fn biases_of_any_layer_count() {
    let last = of_layers("llama", 2);
    assert_eq!(config(&last)["attention_bias"], false);
    assert_eq!(config(&last)["mlp_bias"], false);
    let biased = config(&last.clone().floats("blk.1.attn_k.bias", &[4], 0.0));
    assert_eq!((&biased["attention_bias"], &biased["mlp_bias"]), (&json!(true), &json!(false)));
    let biased = config(&last.floats("blk.1.ffn_down.bias", &[8], 0.0));
    assert_eq!((&biased["attention_bias"], &biased["mlp_bias"]), (&json!(false), &json!(true)));
}

#[test]
fn gemma3_without_a_window_has_one_rope() {
    let windows =
        |sketch: &GgufSketch| ModelConfig::read(&files(sketch)).expect("a configuration").attention.windows;
    let plain = of_layers("gemma3", 7);
    assert_eq!(windows(&plain), [None; 7]);
    assert_eq!(windows(&plain.clone().size("gemma3.attention.sliding_window", 0)), [None; 7]);
    let mut wanted = [Some(9); 7];
    wanted[5] = None;
    assert_eq!(windows(&plain.size("gemma3.attention.sliding_window", 9)), wanted);
    // The default of the family counts.
    assert_eq!(config(&of_layers("gemma2", 7)).get("sliding_window"), None);
}

#[test]
fn models_of_27b_are_known_by_their_layers() {
    for (architecture, layers) in [("gemma2", 46), ("gemma3", 62)] {
        let scalar = |layers: u32| {
            let sketch = of_layers(architecture, layers)
                .size(&format!("{architecture}.attention.key_length"), 6)
                .size(&format!("{architecture}.attention.value_length"), 6);
            config(&sketch)["query_pre_attn_scalar"].clone()
        };
        // The width over the heads, and otherwise the width of a head.
        assert_eq!([layers - 1, layers, layers + 1].map(scalar), [6, 4, 6], "{architecture}");
    }
}

#[test]
fn phi3_has_its_own_scaling_only() {
    let with = |sketch: GgufSketch, words: &str| refused(&sketch, words);
    let phi3 = || metadata("phi3").floats("token_embd.weight", &[8, 4], 0.0);
    with(phi3().floats("rope_freqs.weight", &[2], 1.0), "rope_freqs.weight of architecture phi3");
    with(phi3().number("phi3.rope.scaling.attn_factor", 1.5), "phi3.rope.scaling.attn_factor 1.5");
    with(phi3().number("phi3.rope.scaling.factor", 4.0), "phi3.rope.scaling.factor 4");
    with(phi3().number("phi3.rope.scale_linear", 4.0), "phi3.rope.scale_linear 4");
    let long = phi3()
        .size("phi3.rope.scaling.original_context_length", 16)
        .floats("rope_factors_short.weight", &[2], 1.0)
        .floats("rope_factors_long.weight", &[2], 3.0);
    with(long.clone().text("phi3.rope.scaling.type", "linear"), "linear with rope_factors_long.weight");
    with(long.clone().number("phi3.rope.scaling.factor", 4.0), "phi3.rope.scaling.factor 4");
    for allowed in [
        phi3().number("phi3.rope.scaling.attn_factor", 1.0).number("phi3.rope.scaling.factor", 1.0),
        long.clone().text("phi3.rope.scaling.type", "longrope"),
        long.clone().text("phi3.rope.scaling.type", "yarn"),
        long,
    ] {
        opened(&allowed).expect("nothing to refuse");
    }
}
