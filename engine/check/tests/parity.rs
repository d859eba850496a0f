//! The engine against recorded outputs of `transformers` on tiny checkpoints of all families.
//!
//! `fixtures/` is a subset of the oracle's output (see `fixtures/README.md`). `BATON_PARITY_DIR` names a full set to
//! run against as well.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails")]

use std::path::{Path, PathBuf};

use baton_engine::compute::cuda::{Accelerator, DeviceChoice};
use safetensors::SafeTensors;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// Runs all checks of a folder. Returns the number of models that the device does not compute.
fn assert_parity(dir: &Path, device: DeviceChoice) -> usize {
    let mut lines = Vec::new();
    let report = baton_engine_check::parity::run(dir, device, &mut lines).expect("the folder is complete");
    let text = String::from_utf8(lines).expect("the report is text");
    // Shown with --nocapture.
    eprintln!("{text}");
    assert!(report.passed > 0 && report.failed == 0, "{text}");
    report.skipped
}

#[test]
fn the_cpu_matches_transformers() {
    assert_eq!(assert_parity(&fixtures(), DeviceChoice::Cpu), 0);
}

#[test]
fn the_software_device_matches_transformers() {
    // Without attention sinks.
    assert_eq!(assert_parity(&fixtures(), baton_engine_check::SOFTWARE), 2);
}

#[test]
fn a_missing_device_is_an_error_without_results() {
    // No machine has this many GPUs. Most machines that run this test have neither a GPU nor a driver.
    let absent = DeviceChoice::Accelerator(Accelerator::Cuda(4_000));
    let mut lines = Vec::new();
    assert!(baton_engine_check::parity::run(&fixtures(), absent, &mut lines).is_err());
    assert_eq!(String::from_utf8_lossy(&lines), "");
}

#[test]
fn a_full_set_of_checkpoints_matches_transformers() {
    if let Some(dir) = std::env::var_os("BATON_PARITY_DIR") {
        assert_eq!(assert_parity(Path::new(&dir), DeviceChoice::Cpu), 0);
    }
}

/// A checkpoint with a planted mistake: its configuration and its tensors, bf16, each with its shape.
struct Checkpoint {
    folder: PathBuf,
    config: serde_json::Value,
}

impl Checkpoint {
    /// A copy of a fixture with its golden files, in `dir`.
    fn copied(name: &str, dir: &Path) -> Self {
        let folder = dir.join(name);
        std::fs::create_dir(&folder).unwrap();
        std::fs::create_dir(dir.join("golden")).unwrap();
        for entry in std::fs::read_dir(fixtures().join(name)).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, folder.join(path.file_name().unwrap())).unwrap();
        }
        for file in ["json", "safetensors"].map(|extension| format!("golden/{name}.{extension}")) {
            std::fs::copy(fixtures().join(&file), dir.join(file)).unwrap();
        }
        let config = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        Self { folder, config }
    }

    fn number(&self, name: &str) -> usize {
        usize::try_from(self.config[name].as_u64().unwrap()).unwrap()
    }

    fn head_dim(&self) -> usize {
        self.config["head_dim"].as_u64().map_or_else(
            || self.number("hidden_size") / self.number("num_attention_heads"),
            |dim| dim as usize,
        )
    }

    /// Changes the configuration.
    fn configure(&mut self, change: impl FnOnce(&mut serde_json::Value)) {
        change(&mut self.config);
        std::fs::write(self.folder.join("config.json"), self.config.to_string()).unwrap();
    }

    /// Sets a field of the configuration.
    fn set(&mut self, name: &str, value: impl Into<serde_json::Value>) {
        self.configure(|config| config[name] = value.into());
    }

    /// Exchanges the first and the second half of the rows.
    fn swap_halves(&self, suffix: &str) {
        self.change(suffix, |rows| {
            let half = rows.len() / 2;
            rows.rotate_left(half);
        });
    }

    /// Changes the rows of every tensor whose name ends with `suffix`, row by row, two bytes per element.
    fn change(&self, suffix: &str, change: impl Fn(&mut [Vec<u8>])) {
        let mut changed = 0;
        for entry in std::fs::read_dir(&self.folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let mut bytes = std::fs::read(&path).unwrap();
            let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
            let data =
                bytes.len() - metadata.tensors().values().map(|info| info.data_offsets.1).max().unwrap();
            assert!(data > header, "the tensors follow the header");
            for (name, info) in metadata.tensors() {
                if !name.ends_with(suffix) {
                    continue;
                }
                let at = data + info.data_offsets.0..data + info.data_offsets.1;
                let row = 2 * info.shape[1..].iter().product::<usize>();
                let mut rows: Vec<_> = bytes[at.clone()].chunks(row).map(<[u8]>::to_vec).collect();
                change(&mut rows);
                bytes[at].copy_from_slice(&rows.concat());
                changed += 1;
            }
            std::fs::write(&path, bytes).unwrap();
        }
        assert!(changed > 0, "{suffix}: no such tensor");
    }

    fn fill(&self, suffix: &str, value: [u8; 2]) {
        self.change(suffix, |rows| rows.iter_mut().for_each(|row| row.as_chunks_mut().0.fill(value)));
    }

    /// Reorders the rows of each head. `order` returns the source of each position.
    fn reorder(&self, suffix: &str, order: impl Fn(usize) -> usize) {
        let dim = self.head_dim();
        self.change(suffix, |rows| {
            for head in rows.chunks_mut(dim) {
                let before = head.to_vec();
                (0..dim).for_each(|place| head[place].clone_from(&before[order(place)]));
            }
        });
    }
}

#[test]
fn the_text_model_of_a_checkpoint_with_images_matches_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let mut checkpoint = Checkpoint::copied("gemma3-bf16", dir.path());
    checkpoint.configure(|config| {
        let text = std::mem::take(config);
        *config = serde_json::json!({
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text
        });
    });
    let path = checkpoint.folder.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let renamed = tensors.tensors().into_iter().map(|(name, view)| (format!("language_model.{name}"), view));
    std::fs::write(&path, safetensors::serialize(renamed, None).unwrap()).unwrap();
    assert_eq!(assert_parity(dir.path(), DeviceChoice::Cpu), 0);
}

/// A mistake of an engine, planted in the checkpoint: the engine then computes as with the mistake.
type PlantedMistake = (&'static str, fn(&mut Checkpoint));

const ONE: [u8; 2] = [0x80, 0x3f];
const ZERO: [u8; 2] = [0, 0];
/// -128.
const FAR_BELOW: [u8; 2] = [0, 0xc3];

/// The mistakes of `make_tiny.py --audit` that a checkpoint can contain.
const OF_ALL: &[PlantedMistake] = &[
    ("rope frequencies off", |checkpoint| {
        checkpoint.configure(|config| {
            config["rope_theta"] = (config["rope_theta"].as_f64().unwrap() * 0.7).into();
        });
    }),
    ("interleaved instead of half-split rope", |checkpoint| {
        // Pairs of neighbours become pairs of halves.
        let half = checkpoint.head_dim() / 2;
        for name in ["q_proj.weight", "k_proj.weight"] {
            checkpoint.reorder(name, |place| place % half * 2 + place / half);
        }
    }),
    ("post-attention norm weight ignored", |checkpoint| {
        checkpoint.fill("post_attention_layernorm.weight", ONE);
    }),
];
const OF_YARN: &[PlantedMistake] = &[
    ("rope scaling ignored", |checkpoint| {
        checkpoint.configure(|config| drop(config.as_object_mut().unwrap().remove("rope_scaling")));
    }),
    ("yarn attention factor ignored", |checkpoint| {
        checkpoint.configure(|config| config["rope_scaling"]["attention_factor"] = 1.0.into());
    }),
    ("q bias ignored", |checkpoint| checkpoint.fill("q_proj.bias", ZERO)),
    ("k bias ignored", |checkpoint| checkpoint.fill("k_proj.bias", ZERO)),
    ("v bias ignored", |checkpoint| checkpoint.fill("v_proj.bias", ZERO)),
];
const OF_QWEN3: &[PlantedMistake] = &[
    ("qk-norm weights ignored", |checkpoint| {
        checkpoint.fill("q_norm.weight", ONE);
        checkpoint.fill("k_norm.weight", ONE);
    }),
    ("GQA groups tiled instead of repeated", |checkpoint| {
        // Query heads move to where the engine reads the KV head that the mistake would read.
        let (dim, kv) = (checkpoint.head_dim(), checkpoint.number("num_key_value_heads"));
        let group = checkpoint.number("num_attention_heads") / kv;
        let head = move |place: usize| place % group * kv + place / group;
        checkpoint.change("q_proj.weight", |rows| {
            let before = rows.to_vec();
            (0..rows.len()).for_each(|at| rows[at].clone_from(&before[head(at / dim) * dim + at % dim]));
        });
        checkpoint.change("o_proj.weight", |rows| {
            for row in rows {
                let heads: Vec<_> = row.chunks(2 * dim).map(<[u8]>::to_vec).collect();
                *row = (0..heads.len()).flat_map(|place| heads[head(place)].clone()).collect();
            }
        });
    }),
];

const OF_MISTRAL: &[PlantedMistake] = &[
    ("window ignored", |checkpoint| checkpoint.set("sliding_window", serde_json::Value::Null)),
    ("window short by one key", |checkpoint| checkpoint.set("sliding_window", 23)),
];
const OF_PHI3: &[PlantedMistake] = &[
    ("up before gate", |checkpoint| checkpoint.swap_halves("gate_up_proj.weight")),
    ("k and v swapped", |checkpoint| {
        let query = checkpoint.number("num_attention_heads") * checkpoint.head_dim();
        checkpoint.change("qkv_proj.weight", |rows| {
            let half = (rows.len() - query) / 2;
            rows[query..].rotate_left(half);
        });
    }),
];
const OF_PHI3_LONG: &[PlantedMistake] = &[
    ("divisors of the short context", |checkpoint| {
        checkpoint.configure(|config| {
            let short = config["rope_scaling"]["short_factor"].clone();
            config["rope_scaling"]["long_factor"] = short;
        });
    }),
    ("attention factor ignored", |checkpoint| {
        checkpoint.configure(|config| config["rope_scaling"]["attention_factor"] = 1.0.into());
    }),
];
const OF_GEMMA2: &[PlantedMistake] = &[
    ("soft cap of scores ignored", |checkpoint| {
        checkpoint.set("attn_logit_softcapping", serde_json::Value::Null);
    }),
    ("soft cap of logits ignored", |checkpoint| {
        checkpoint.set("final_logit_softcapping", serde_json::Value::Null);
    }),
    ("scale by the width of a head", |checkpoint| checkpoint.set("query_pre_attn_scalar", 32)),
    ("silu instead of gelu", |checkpoint| checkpoint.set("hidden_activation", "silu")),
    ("windows ignored", |checkpoint| checkpoint.set("sliding_window", 320)),
    ("norm after attention ignored", |checkpoint| {
        checkpoint.fill("post_attention_layernorm.weight", ZERO);
    }),
];
const OF_GEMMA3: &[PlantedMistake] = &[
    ("one rope for all layers", |checkpoint| checkpoint.set("rope_local_base_freq", 1e6)),
    ("rope scaling ignored", |checkpoint| checkpoint.set("rope_scaling", serde_json::Value::Null)),
    ("windows in other layers", |checkpoint| checkpoint.set("sliding_window_pattern", 3)),
];
const OF_QWEN3_MOE: &[PlantedMistake] = &[
    ("weights of experts not normalized", |checkpoint| checkpoint.set("norm_topk_prob", false)),
    ("one expert less", |checkpoint| checkpoint.set("num_experts_per_tok", 2)),
];
const OF_MIXTRAL: &[PlantedMistake] = &[
    ("one expert less", |checkpoint| checkpoint.set("num_experts_per_tok", 1)),
    ("one expert more", |checkpoint| checkpoint.set("num_experts_per_tok", 3)),
];

const OF_GPT_OSS: &[PlantedMistake] = &[
    ("sinks ignored", |checkpoint| checkpoint.fill("self_attn.sinks", FAR_BELOW)),
    ("windows in other layers", |checkpoint| {
        checkpoint.set("layer_types", serde_json::json!(["sliding_attention", "full_attention"]));
    }),
    ("ends of the ramp in whole dimensions", |checkpoint| {
        checkpoint.configure(|config| config["rope_scaling"]["truncate"] = true.into());
    }),
    ("bias of the output ignored", |checkpoint| checkpoint.fill("o_proj.bias", ZERO)),
    ("bias of the router ignored", |checkpoint| checkpoint.fill("router.bias", ZERO)),
    ("biases of gate and up ignored", |checkpoint| checkpoint.fill("gate_up_proj_bias", ZERO)),
    ("biases of down ignored", |checkpoint| checkpoint.fill("down_proj_bias", ZERO)),
    ("up before gate", |checkpoint| {
        for name in ["gate_up_proj", "gate_up_proj_bias"] {
            checkpoint.change(name, |rows| {
                rows.iter_mut().for_each(|row| row.chunks_exact_mut(4).for_each(|pair| pair.rotate_left(2)));
            });
        }
    }),
    ("gate and up without limits", |checkpoint| checkpoint.set("swiglu_limit", 1e30)),
    ("one expert only", |checkpoint| checkpoint.set("num_experts_per_tok", 1)),
];
const OF_MXFP4: &[PlantedMistake] = &[
    ("the upper half of a byte first", |checkpoint| {
        checkpoint.change("_blocks", |rows| {
            rows.iter_mut().flatten().for_each(|byte| *byte = byte.rotate_left(4));
        });
    }),
    ("scales with another bias", |checkpoint| {
        checkpoint.change("_scales", |rows| rows.iter_mut().flatten().for_each(|byte| *byte += 1));
    }),
    ("sinks ignored", |checkpoint| checkpoint.fill("self_attn.sinks", FAR_BELOW)),
];

/// Asserts that every comparison with the bf16 run fails for every mistake.
fn assert_found(name: &str, device: DeviceChoice, mistakes: &[PlantedMistake]) {
    for (mistake, plant) in mistakes {
        let dir = tempfile::tempdir().unwrap();
        plant(&mut Checkpoint::copied(name, dir.path()));
        let mut lines = Vec::new();
        baton_engine_check::parity::run(dir.path(), device, &mut lines).expect("the folder is complete");
        let text = String::from_utf8(lines).unwrap();
        let compared: Vec<_> = text
            .lines()
            .filter(|line| line.contains(" bf16 run") && line.contains(": mean divergence"))
            .collect();
        assert!(!compared.is_empty(), "{text}");
        assert!(compared.iter().all(|line| line.starts_with("FAIL")), "{name}, {mistake}: {compared:#?}");
    }
}

#[test]
fn planted_mistakes_fail_against_the_bf16_run() {
    assert_found("qwen2-yarn-bf16", DeviceChoice::Cpu, &[OF_ALL, OF_YARN].concat());
    assert_found("qwen3-bf16", DeviceChoice::Cpu, &[OF_ALL, OF_QWEN3].concat());
}

#[test]
fn planted_mistakes_of_further_families_fail_against_the_bf16_run() {
    for (name, mistakes) in [
        ("mistral-bf16", OF_MISTRAL),
        ("phi3-bf16", OF_PHI3),
        ("phi3-long-bf16", OF_PHI3_LONG),
        ("gemma2-bf16", OF_GEMMA2),
        ("gemma3-bf16", OF_GEMMA3),
        ("qwen3moe-bf16", OF_QWEN3_MOE),
        ("mixtral-bf16", OF_MIXTRAL),
        ("gpt-oss-bf16", OF_GPT_OSS),
        ("gpt-oss-mxfp4", OF_MXFP4),
    ] {
        assert_found(name, DeviceChoice::Cpu, mistakes);
    }
}

#[test]
fn planted_mistakes_fail_on_the_software_device_in_bf16() {
    let software = baton_engine_check::SOFTWARE;
    assert_found("qwen2-yarn-bf16", software, &[OF_ALL, OF_YARN].concat());
}

#[test]
fn planted_mistakes_of_further_families_fail_on_the_software_device() {
    let software = baton_engine_check::SOFTWARE;
    assert_found("mistral-bf16", software, OF_MISTRAL);
    assert_found("gemma2-bf16", software, OF_GEMMA2);
    assert_found("mixtral-bf16", software, OF_MIXTRAL);
}

#[test]
fn a_golden_file_requires_the_distance_of_the_bf16_run() {
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::copied("qwen2-yarn-bf16", dir.path());
    let path = dir.path().join("golden/qwen2-yarn-bf16.json");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for wrong in [serde_json::Value::Null, 0.into(), "much".into()] {
        let mut golden = golden.clone();
        golden["noise"]["bf16_vs_f32_kl_mean"] = wrong;
        std::fs::write(&path, golden.to_string()).unwrap();
        let error =
            baton_engine_check::parity::run(dir.path(), DeviceChoice::Cpu, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("noise"), "{error}");
    }
}
