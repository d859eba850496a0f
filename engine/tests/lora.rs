//! LoRA adapters against the logits that PEFT and transformers compute with them (`fixtures/make_lora.py`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_connector::BlockId;
use baton_engine::compute::cpu::{CpuExecutor, CpuOptions};
use baton_engine::compute::{Executor, Logits, LogitsRequest, SeqStep};
use baton_engine::model::ModelFiles;
use baton_engine::model::config::ModelConfig;
use baton_engine::model::lora::{AdapterIndex, LoraAdapter};
use safetensors::SafeTensors;

/// As for models without adapters: float32 against float32.
const MAX_LOGIT_DIFFERENCE: f32 = 5e-4;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// The logits of all positions with each of the adapters, in one step.
fn logits_with(base: &str, adapters: &[&str], prompt: &[u32]) -> Vec<Vec<f32>> {
    let files = ModelFiles::at(&fixtures().join(base)).expect("a checkpoint");
    let config = ModelConfig::read(&files).expect("a sound configuration");
    let open = |name: &&str| {
        LoraAdapter::open(&fixtures().join("lora").join(name), &config).expect("a sound adapter")
    };
    let loaded: Vec<LoraAdapter> = adapters.iter().map(open).collect();
    let options = CpuOptions {
        blocks: 16,
        block_tokens: 8,
        threads: 2,
        adapters: Arc::from(loaded),
        ..CpuOptions::default()
    };
    let mut executor = CpuExecutor::load(&files, &config, &options, &mut |_| ()).expect("it loads");
    let tables: Vec<Vec<BlockId>> =
        (0..adapters.len() as u32).map(|first| (0..2).map(|at| BlockId(2 * first + at)).collect()).collect();
    let mut batch = Vec::new();
    for (index, block_table) in tables.iter().enumerate() {
        batch.push(SeqStep {
            tokens: prompt,
            start: 0,
            block_table,
            logits: LogitsRequest::All,
            adapter: Some(AdapterIndex(index)),
        });
    }
    let mut logits = Logits::default();
    executor.execute(&batch, &mut logits).expect("computed");
    logits.values.chunks(prompt.len() * logits.vocab).map(<[f32]>::to_vec).collect()
}

#[test]
fn logits_with_an_adapter_are_those_of_peft() {
    let bytes = std::fs::read(fixtures().join("lora/golden.safetensors")).expect("the fixture is there");
    let golden = SafeTensors::deserialize(&bytes).expect("tensors");
    let raw = |name: &str| {
        let view = golden.tensor(name).expect("it is there");
        view.data().as_chunks::<4>().0.to_vec()
    };
    for (base, adapters) in [
        ("llama3-f32", &["llama3-all", "llama3-other"][..]),
        ("qwen3-f32", &["qwen3-rslora"][..]),
        ("phi3-bf16", &["phi3-fused"][..]),
        ("gemma2-bf16", &["gemma2-norms"][..]),
        ("qwen3moe-bf16", &["qwen3moe-attention"][..]),
    ] {
        for (at, name) in adapters.iter().enumerate() {
            let prompt: Vec<u32> =
                raw(&format!("{name}.prompt")).into_iter().map(u32::from_le_bytes).collect();
            let wanted: Vec<f32> =
                raw(&format!("{name}.logits")).into_iter().map(f32::from_le_bytes).collect();
            let found = logits_with(base, adapters, &prompt).swap_remove(at);
            assert_eq!(found.len(), wanted.len(), "{name}");
            let far = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far <= MAX_LOGIT_DIFFERENCE && found.iter().all(|x| x.is_finite()), "{name}: {far}");
        }
    }
}
