//! Adapters that fit, and hostile ones.

use safetensors::tensor::serialize;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::model::generation::GenerationDefaults;

/// A model of the family with two layers. Layers of Mixtral have experts.
fn model(architecture: &str) -> ModelConfig {
    let mut text = json!({
        "architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100
    });
    if architecture == "MixtralForCausalLM" {
        text["num_local_experts"] = json!(4);
    }
    ModelConfig::parse(text.to_string().as_bytes(), GenerationDefaults::default()).expect("a sound model")
}

/// The text model of a checkpoint with images, with two layers.
fn with_images(architecture: &str) -> ModelConfig {
    let part = json!({
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 96, "vocab_size": 100
    });
    let text = json!({"architectures": [architecture], "text_config": part});
    ModelConfig::parse(text.to_string().as_bytes(), GenerationDefaults::default()).expect("a sound model")
}

/// The fields of an adapter of rank 4 for these modules.
fn fields(targets: Value) -> Value {
    json!({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": targets,
        "task_type": "CAUSAL_LM", "use_dora": false, "modules_to_save": null, "qalora_group_size": 16})
}

/// Name, type, shape and bytes.
type LoraTensor = (String, Dtype, Vec<usize>, Vec<u8>);

fn floats(seed: usize, shape: [usize; 2]) -> Vec<f32> {
    (0..shape[0] * shape[1]).map(|i| ((i * 31 + seed * 17) % 64) as f32 / 64.0 - 0.5).collect()
}

fn tensor(name: &str, seed: usize, shape: [usize; 2]) -> LoraTensor {
    let bytes = floats(seed, shape).iter().flat_map(|value| value.to_le_bytes()).collect();
    (format!("base_model.model.{name}"), Dtype::F32, shape.to_vec(), bytes)
}

/// Both matrices of a module.
fn pair(module: &str, rank: usize, outputs: usize, inputs: usize) -> Vec<LoraTensor> {
    vec![
        tensor(&format!("{module}.lora_A.weight"), 1, [rank, inputs]),
        tensor(&format!("{module}.lora_B.weight"), 2, [outputs, rank]),
    ]
}

/// q and v of both layers.
fn queries_and_values() -> Vec<LoraTensor> {
    let of_layer = |layer: usize| {
        let module = |name: &str| format!("model.layers.{layer}.self_attn.{name}");
        [pair(&module("q_proj"), 4, 64, 64), pair(&module("v_proj"), 4, 32, 64)].concat()
    };
    [of_layer(0), of_layer(1)].concat()
}

fn written(fields: &Value, tensors: &[LoraTensor]) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join(CONFIG_FILE), fields.to_string()).expect("written");
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("its bytes"))
    });
    let file = serialize(views.collect::<Vec<_>>(), None).expect("a file");
    std::fs::write(folder.path().join(WEIGHTS_FILE), file).expect("written");
    folder
}

fn open(architecture: &str, fields: &Value, tensors: &[LoraTensor]) -> Result<LoraAdapter, String> {
    let folder = written(fields, tensors);
    LoraAdapter::open(folder.path(), &model(architecture)).map_err(|error| error.to_string())
}

/// An adapter of every projection of a model, for other tests. Its values depend on `seed`.
pub(crate) fn adapter_of(model: &ModelConfig, seed: usize, rank: usize) -> LoraAdapter {
    adapter_of_some(model, seed, rank, |_| true)
}

/// The same of some projections, by the names of their modules.
pub(crate) fn adapter_of_some(
    model: &ModelConfig,
    seed: usize,
    rank: usize,
    is_some: impl Fn(&str) -> bool,
) -> LoraAdapter {
    let mut tensors = Vec::new();
    for (module, slot) in slots(model).into_iter().filter(|(module, _)| is_some(module)) {
        let seed = seed + module.len() + slot.layer;
        tensors.push(tensor(&format!("{module}.lora_A.weight"), seed, [rank, slot.inputs]));
        tensors.push(tensor(&format!("{module}.lora_B.weight"), seed + 1, [slot.outputs, rank]));
    }
    // An expression, so that the file decides which projections have an adapter.
    let mut fields = fields(json!(".*"));
    (fields["r"], fields["lora_alpha"]) = (json!(rank), json!(0.25));
    LoraAdapter::open(written(&fields, &tensors).path(), model).expect("sound")
}

#[track_caller]
fn refused(fields: &Value, tensors: &[LoraTensor], words: &str) {
    let error = open("LlamaForCausalLM", fields, tensors).expect_err(words);
    assert!(error.contains(words), "{error}, not {words}");
}

#[test]
fn parts_have_their_columns_and_b_is_transposed() {
    let adapter =
        open("LlamaForCausalLM", &fields(json!(["q_proj", "v_proj"])), &queries_and_values()).expect("sound");
    assert_eq!(adapter.rank, 4);
    for layer in 0..2 {
        let [q, v] = adapter.parts(layer, LoraSite::Qkv) else { panic!("q and v") };
        assert_eq!((q.first, q.outputs, q.inputs, q.rank, q.scale), (0, 64, 64, 4, 2.0));
        assert_eq!((v.first, v.outputs, v.inputs), (96, 32, 64));
        assert_eq!(v.a, floats(1, [4, 64]));
        let by_output = floats(2, [32, 4]);
        assert!(
            (0..32).all(|output| (0..4).all(|row| v.b[row * 32 + output] == by_output[output * 4 + row]))
        );
        for site in [LoraSite::Output, LoraSite::GateUp, LoraSite::Down] {
            assert!(adapter.parts(layer, site).is_empty());
        }
    }
}

#[test]
fn a_fused_projection_is_one_part_over_all_columns() {
    let modules = |layer: usize| {
        let module = |name: &str| format!("model.layers.{layer}.{name}");
        [
            pair(&module("self_attn.qkv_proj"), 4, 128, 64),
            pair(&module("self_attn.o_proj"), 4, 64, 64),
            pair(&module("mlp.gate_up_proj"), 4, 192, 64),
            pair(&module("mlp.down_proj"), 4, 64, 96),
        ]
        .concat()
    };
    let all = [modules(0), modules(1)].concat();
    let adapter = open("Phi3ForCausalLM", &fields(json!("all-linear")), &all).expect("sound");
    let widths = |site| {
        let parts = adapter.parts(1, site).iter();
        parts.map(|part| (part.first, part.outputs, part.inputs)).collect::<Vec<_>>()
    };
    assert_eq!(widths(LoraSite::Qkv), [(0, 128, 64)]);
    assert_eq!(widths(LoraSite::Output), [(0, 64, 64)]);
    assert_eq!(widths(LoraSite::GateUp), [(0, 192, 64)]);
    assert_eq!(widths(LoraSite::Down), [(0, 64, 96)]);
}

#[test]
fn the_text_model_of_a_checkpoint_with_images_has_two_spellings() {
    for architecture in ["Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration"] {
        let model = with_images(architecture);
        let digest = |prefix: &str| {
            let module = |layer: usize, name: &str| format!("{prefix}layers.{layer}.self_attn.{name}");
            let mut tensors = pair(&module(0, "q_proj"), 2, 64, 64);
            tensors.extend(pair(&module(1, "q_proj"), 4, 64, 64));
            // Targets and patterns have the spelling of the file.
            let mut fields = fields(json!([module(0, "q_proj"), module(1, "q_proj")]));
            fields["rank_pattern"][format!("^{}", module(0, "q_proj"))] = json!(2);
            let adapter = LoraAdapter::open(written(&fields, &tensors).path(), &model).expect(prefix);
            assert_eq!([0, 1].map(|layer| adapter.parts(layer, LoraSite::Qkv)[0].rank), [2, 4]);
            tensors.extend(pair("model.vision_tower.layers.0.self_attn.q_proj", 4, 64, 64));
            let error = LoraAdapter::open(written(&fields, &tensors).path(), &model).expect_err("images");
            assert!(error.to_string().contains("belongs to no projection"), "{error}");
            adapter.digest
        };
        assert_eq!(digest("language_model.model."), digest("model.language_model."), "{architecture}");
    }
    // A model without images has no such names.
    let tensors = pair("model.language_model.layers.0.self_attn.q_proj", 4, 64, 64);
    refused(&fields(json!(["q_proj"])), &tensors, "belongs to no projection");
}

#[test]
fn ranks_and_scales_follow_patterns_and_the_root() {
    let mut tensors = pair("model.layers.0.self_attn.q_proj", 2, 64, 64);
    tensors.extend(pair("model.layers.1.self_attn.q_proj", 4, 64, 64));
    let mut fields = fields(json!(["q_proj"]));
    fields["rank_pattern"] = json!({"layers.0.self_attn.q_proj": 2});
    fields["alpha_pattern"] =
        json!({"^model.layers.0.self_attn.q_proj": 3, "^layers.1.self_attn.q_proj": 100});
    let scales = |fields: &Value| {
        let adapter = open("LlamaForCausalLM", fields, &tensors).expect("sound");
        [0, 1].map(|layer| adapter.parts(layer, LoraSite::Qkv)[0].scale)
    };
    assert_eq!(scales(&fields), [1.5, 2.0], "^ begins the name");
    fields["use_rslora"] = json!(true);
    assert_eq!(scales(&fields), [(3.0 / 2.0_f64.sqrt()) as f32, 4.0]);
}

#[test]
fn a_digest_depends_on_values_and_scales_and_on_nothing_else() {
    let base = fields(json!(["q_proj", "v_proj"]));
    let digest = |fields: &Value, tensors: &[LoraTensor]| {
        open("LlamaForCausalLM", fields, tensors).expect("sound").digest
    };
    let tensors = queries_and_values();
    let of_base = digest(&base, &tensors);
    let mut named = base.clone();
    named["base_model_name_or_path"] = json!("/somewhere/else");
    named["lora_dropout"] = json!(0.1);
    assert_eq!(digest(&named, &tensors), of_base);
    let mut scaled = base.clone();
    scaled["lora_alpha"] = json!(9);
    assert_ne!(digest(&scaled, &tensors), of_base);
    let mut changed = tensors.clone();
    changed[3].3[0] ^= 1;
    assert_ne!(digest(&base, &changed), of_base);
    // The same values in bf16, which holds sixty-fourths.
    let mut narrow = tensors;
    for (_, dtype, _, bytes) in &mut narrow {
        *dtype = Dtype::BF16;
        *bytes = bytes.as_chunks::<4>().0.iter().flat_map(|raw| [raw[2], raw[3]]).collect();
    }
    assert_eq!(digest(&base, &narrow), of_base);
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let tensors = queries_and_values();
    let base = fields(json!(["q_proj", "v_proj"]));
    for (field, value, words) in [
        ("peft_type", json!("IA3"), "peft_type IA3 is not supported"),
        ("use_dora", json!(true), "use_dora true is not supported"),
        ("bias", json!("lora_only"), "bias \"lora_only\" is not supported"),
        ("modules_to_save", json!(["lm_head"]), "modules_to_save is not supported"),
        ("fan_in_fan_out", json!(true), "fan_in_fan_out true"),
        ("lora_bias", json!(true), "lora_bias true"),
        ("layer_replication", json!([[0, 2]]), "layer_replication is not supported"),
        ("trainable_token_indices", json!([3]), "trainable_token_indices is not supported"),
        ("target_parameters", json!(["mlp.experts.down_proj"]), "target_parameters is not supported"),
        ("a_later_field", json!(2), "a_later_field 2 is not supported"),
        ("init_lora_weights", json!("pissa_niter_4"), "init_lora_weights pissa_niter_4"),
        ("target_modules", json!(["q_proj", "v_proj", "lm_head"]), "target_modules lm_head is not supported"),
        ("target_modules", json!(["q_proj", "v_proj", "wte"]), "target_modules wte is not supported"),
        ("rank_pattern", json!({"layers.[01].q_proj": 4}), "rank_pattern with the pattern"),
    ] {
        let mut wrong = base.clone();
        wrong[field] = value;
        refused(&wrong, &tensors, words);
    }
    for (name, words) in [
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("model.embed_tokens.lora_embedding_A", "an adapter of the embedding"),
        ("lm_head.lora_A.weight", "an adapter of the output matrix"),
        ("model.layers.0.mlp.experts.3.up_proj.lora_A.weight", "experts"),
        ("model.layers.0.self_attn.q_proj.bias", "a bias in an adapter"),
        ("model.layers.2.self_attn.q_proj.lora_A.weight", "belongs to no projection"),
        ("model.layers.0.input_layernorm.weight", "belongs to no projection"),
    ] {
        let more = [tensors.clone(), vec![tensor(name, 3, [4, 64])]].concat();
        refused(&base, &more, words);
    }
}

#[test]
fn a_model_with_experts_has_adapters_of_its_attention_only() {
    let fields = fields(json!(["q_proj", "v_proj"]));
    let adapter = open("MixtralForCausalLM", &fields, &queries_and_values()).expect("sound");
    assert_eq!(adapter.parts(0, LoraSite::Qkv).len(), 2);
    let experts = pair("model.layers.0.block_sparse_moe.experts.0.w1", 4, 96, 64);
    let error = open("MixtralForCausalLM", &fields, &[queries_and_values(), experts].concat());
    assert!(error.expect_err("experts").contains("experts or of their router"));
}

#[test]
fn malformed_fields_are_named_with_their_bounds() {
    let tensors = queries_and_values();
    let base = fields(json!(["q_proj", "v_proj"]));
    for (field, value, words) in [
        ("peft_type", Value::Null, "peft_type is absent"),
        ("r", json!(0), "r is 0, not a rank from 1 to 256"),
        ("r", json!(257), "r is 257"),
        ("r", json!(-4), "r is -4"),
        ("r", json!(u64::MAX), "r is 18446744073709551615"),
        ("r", json!("4"), "r is \"4\""),
        ("lora_alpha", json!(1e300), "lora_alpha is 1e"),
        ("use_rslora", json!(1), "use_rslora is 1"),
        ("target_modules", json!([]), "target_modules must be"),
        ("target_modules", json!([7]), "target_modules has 7"),
        ("rank_pattern", json!({"q_proj": 1_u64 << 40}), "rank_pattern q_proj is 1099511627776"),
        ("alpha_pattern", json!([1]), "alpha_pattern must be an object"),
    ] {
        let mut wrong = base.clone();
        wrong[field] = value;
        refused(&wrong, &tensors, words);
    }
    let folder = written(&base, &tensors);
    std::fs::write(folder.path().join(CONFIG_FILE), "[1, 2]").expect("written");
    let error = LoraAdapter::open(folder.path(), &model("LlamaForCausalLM")).expect_err("no object");
    assert!(error.to_string().starts_with(CONFIG_FILE), "{error}");
    std::fs::remove_file(folder.path().join(CONFIG_FILE)).expect("removed");
    let error = LoraAdapter::open(folder.path(), &model("LlamaForCausalLM")).expect_err("no file");
    assert!(error.to_string().contains("adapter_config.json is missing"), "{error}");
}

#[test]
fn tensors_that_do_not_fit_are_refused_before_any_value_is_read() {
    let base = fields(json!(["q_proj", "v_proj"]));
    // Every value is wrong, which reading one would report first.
    let mut endless = queries_and_values();
    for (.., bytes) in &mut endless {
        bytes.as_chunks_mut::<4>().0.fill(f32::INFINITY.to_le_bytes());
    }
    refused(&base, &endless, "has the value inf at 0");
    let change = |at: usize, dtype: Dtype, shape: [usize; 2]| {
        let mut tensors = endless.clone();
        let bytes = shape[0] * shape[1] * dtype.bitsize() / 8;
        tensors[at] = (tensors[at].0.clone(), dtype, shape.to_vec(), vec![0xff; bytes]);
        tensors
    };
    refused(&base, &change(7, Dtype::F32, [33, 4]), "lora_B.weight has shape [33, 4]");
    refused(&base, &change(7, Dtype::F32, [32, 5]), "has shape [32, 5]");
    refused(&base, &change(6, Dtype::F32, [4, 65]), "lora_A.weight has shape [4, 65]");
    refused(&base, &change(6, Dtype::F32, [0, 64]), "has shape [0, 64]");
    refused(&base, &change(6, Dtype::I8, [4, 64]), "of type I8");
    let missing = |at: usize| {
        let mut tensors = endless.clone();
        tensors.remove(at);
        tensors
    };
    refused(&base, &missing(7), "v_proj.lora_B.weight is missing");
    refused(&base, &missing(6), "v_proj.lora_A.weight is missing");
    let mut incomplete = endless.clone();
    incomplete.truncate(6);
    refused(&base, &incomplete, "model.layers.1.self_attn.v_proj, which has no adapter");
    refused(&fields(json!(["q_proj"])), &endless, "target_modules has no entry for");
    let mut some = base.clone();
    some["layers_to_transform"] = json!([0]);
    refused(&some, &[], "has no tensors");
    let folder = written(&base, &endless);
    let file = folder.path().join(WEIGHTS_FILE);
    let bytes = std::fs::read(&file).expect("it is there");
    for broken in [&bytes[..bytes.len() - 1], &bytes[..7], &[0xff; 64][..], &b""[..]] {
        std::fs::write(&file, broken).expect("written");
        let error = LoraAdapter::open(folder.path(), &model("LlamaForCausalLM")).expect_err("broken");
        assert!(error.to_string().starts_with(WEIGHTS_FILE), "{error}");
    }
    std::fs::remove_file(&file).expect("removed");
    let error = LoraAdapter::open(folder.path(), &model("LlamaForCausalLM")).expect_err("no file");
    assert!(error.to_string().contains("adapter_model.safetensors is missing"), "{error}");
}

#[test]
fn layers_without_an_adapter_are_allowed_where_the_file_says_so() {
    let mut tensors = queries_and_values();
    tensors.truncate(4);
    let mut some = fields(json!(["q_proj", "v_proj"]));
    some["layers_to_transform"] = json!([0]);
    let adapter = open("LlamaForCausalLM", &some, &tensors).expect("sound");
    assert_eq!([0, 1].map(|layer| adapter.parts(layer, LoraSite::Qkv).len()), [2, 0]);
    let pattern = fields(json!("model\\.layers\\.0\\.self_attn\\.(q|v)_proj"));
    let adapter = open("LlamaForCausalLM", &pattern, &tensors).expect("sound");
    assert_eq!([0, 1].map(|layer| adapter.parts(layer, LoraSite::Qkv).len()), [2, 0]);
}
