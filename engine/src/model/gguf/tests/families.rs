//! Families of GGUF files besides the first ones: experts, norms, windows, LongRoPE, markers.

use super::*;

#[test]
fn the_matrices_of_all_experts_are_one_tensor_in_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("m.gguf");
    let sketch = mixture().size("qwen3moe.expert_feed_forward_length", 6);
    let sketch = sketch.floats("blk.0.ffn_up_exps.weight", &[8, 6, 2], 0.0);
    let sketch = sketch.floats("blk.0.ffn_gate_inp.weight", &[8, 2], 500.0);
    std::fs::write(&path, sketch.file()).expect("written");
    let files = ModelFiles::at(&path).expect("a model");
    let experts = ModelConfig::read(&files).expect("a configuration").mlp.experts.expect("experts");
    assert_eq!((experts.count, experts.per_token, experts.intermediate, experts.normalized), (2, 1, 6, true));
    let weights = Weights::open(&files).expect("weights");
    for (name, shape, first) in [
        ("mlp.experts.0.up_proj", [6, 8], 0.0),
        ("mlp.experts.1.up_proj", [6, 8], 48.0),
        ("mlp.gate", [2, 8], 500.0),
    ] {
        let name = format!("model.layers.0.{name}.weight");
        let mut values = [0.0; 2];
        weights.tensor(&name, &shape).expect("its shape").read_f32(0, &mut values);
        assert_eq!(values, [first, first + 1.0], "{name}");
    }
    // The architecture llama with experts has the names of Mixtral.
    let sketch = model("llama").size("llama.expert_count", 2).size("llama.expert_used_count", 1);
    let sketch = sketch.floats("blk.0.ffn_down_exps.weight", &[8, 8, 2], 0.0);
    let files = opened(&sketch).expect("a model");
    let names: Vec<String> = files.entries().expect("tensors").into_iter().map(|entry| entry.name).collect();
    assert!(names.contains(&"model.layers.0.block_sparse_moe.experts.1.w2.weight".to_owned()), "{names:?}");
}

#[test]
fn one_is_taken_from_the_norms_of_gemma() {
    let folder = tempfile::tempdir().expect("a folder");
    for (architecture, name, wanted) in [
        ("gemma2", "pre_feedforward_layernorm", 6.0),
        ("gemma3", "pre_feedforward_layernorm", 6.0),
        ("llama", "post_attention_layernorm", 7.0),
    ] {
        let sketch = model(architecture).floats("blk.0.ffn_norm.weight", &[8], 7.0);
        std::fs::write(folder.path().join("m.gguf"), sketch.file()).expect("written");
        let weights = Weights::open(&ModelFiles::at(folder.path()).expect("a model")).expect("weights");
        let norm = weights.tensor(&format!("model.layers.0.{name}.weight"), &[8]).expect("its shape");
        let mut values = [0.0; 2];
        norm.read_f32(0, &mut values);
        assert_eq!(values, [wanted, wanted + 1.0], "{architecture}");
    }
}

#[test]
fn windows_scales_and_caps_of_gemma_follow_from_the_file() {
    let config = |sketch: &GgufSketch| opened(sketch).expect("a model").config().expect("a configuration");
    let of_gemma2 = config(&model("gemma2").size("gemma2.attention.sliding_window", 9));
    assert_eq!(of_gemma2["sliding_window"], 9);
    // The model of 27B is known by its layers. Heads have 4 elements.
    assert_eq!(of_gemma2["query_pre_attn_scalar"], 4);
    assert_eq!(of_gemma2.get("attn_logit_softcapping"), None);
    let capped = model("gemma2").number("gemma2.attn_logit_softcapping", 0.0);
    let capped = config(&capped.number("gemma2.final_logit_softcapping", 7.0));
    assert_eq!(
        (&capped["attn_logit_softcapping"], &capped["final_logit_softcapping"]),
        (&Value::Null, &json!(7.0))
    );
    let of_gemma3 = config(&model("gemma3").number("gemma3.rope.freq_base", 5e5));
    assert_eq!((&of_gemma3["rope_theta"], &of_gemma3["rope_local_base_freq"]), (&json!(5e5), &json!(1e4)));
    assert_eq!(of_gemma3["sliding_window_pattern"], 6);
}

#[test]
fn longrope_is_two_tensors_of_the_file() {
    let sketch = metadata("phi3")
        .floats("token_embd.weight", &[8, 4], 0.0)
        .size("phi3.rope.scaling.original_context_length", 16)
        .floats("rope_factors_short.weight", &[2], 1.0)
        .floats("rope_factors_long.weight", &[2], 3.0);
    let scaling = |sketch: &GgufSketch| {
        opened(sketch).expect("a model").config().expect("a configuration")["rope_scaling"].clone()
    };
    let found = scaling(&sketch.clone().number("phi3.rope.scaling.attn_factor", 1.224_744_9));
    assert_eq!((&found["short_factor"], &found["long_factor"]), (&json!([1.0, 2.0]), &json!([3.0, 4.0])));
    // The factor of a context that is four times as long: it is derived.
    assert_eq!(
        (found.get("attention_factor"), &found["original_max_position_embeddings"]),
        (None, &json!(16))
    );
    let other = scaling(&sketch.number("phi3.rope.scaling.attn_factor", 1.5));
    assert_eq!(other["attention_factor"], 1.5);
}

#[test]
fn spaces_behind_a_marker_belong_to_it_in_phi3() {
    let trimmed = |architecture: &str| {
        let sketch = GgufSketch::default()
            .text("general.architecture", architecture)
            .text("tokenizer.ggml.model", "llama")
            .texts("tokenizer.ggml.tokens", &["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>"])
            .wholes("tokenizer.ggml.scores", &[0; 5])
            .wholes("tokenizer.ggml.token_type", &[2, 3, 4, 3, 3]);
        let file = sketch.file();
        let header = GgufHeader::read("m.gguf", &file).expect("a header");
        let tokenizer = Vocabulary::read(&header).expect("a vocabulary").tokenizer().expect("a tokenizer");
        let added = tokenizer["added_tokens"].as_array().expect("a list").clone();
        added
            .iter()
            .filter(|token| token["rstrip"] == true)
            .map(|token| token["id"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(trimmed("phi3"), [2, 4]);
    assert!(trimmed("llama").is_empty());
}
