//! The executor on the software device, compared with the CPU executor: the same launches as on a GPU.
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod draws;
mod failures;
mod mirror;

use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};

use baton_connector::BlockId;
use baton_connector::region::Region;
use baton_engine::compute::cpu::{CpuExecutor, CpuOptions};
use baton_engine::compute::cuda::device::{Device, DeviceError, Priority};
use baton_engine::compute::cuda::{CudaExecutor, DeviceOptions, Element, LoadError, PoolSize};
use baton_engine::compute::{Executor, ExecutorError, Logits, LogitsRequest, SeqStep};
use baton_engine::model::config::ModelConfig;
use baton_engine::model::generation::GenerationDefaults;
use baton_engine::model::weights::Weights;
use baton_engine::sampling::{Draw, SamplingParams, TokenPosition};
use baton_engine_check::software::{CopyGate, SoftwareDevice};

const VOCAB: u32 = 150;
/// Largest difference of f32 results with different orders of summation.
const FAR: f32 = 1e-3;

fn config(family: &str, more: &str) -> ModelConfig {
    let head_dim = if family == "Llama" { 32 } else { 24 };
    let text = format!(
        r#"{{"architectures": ["{family}ForCausalLM"], "hidden_size": 72, "num_hidden_layers": 3,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": {head_dim}, "intermediate_size": 100,
            "vocab_size": {VOCAB}, "eos_token_id": 1 {more} }}"#
    );
    ModelConfig::parse(text.as_bytes(), GenerationDefaults::default()).unwrap()
}

/// One checkpoint of each family, with every feature of it.
fn families() -> Vec<ModelConfig> {
    vec![
        config("Llama", r#", "attention_bias": true, "mlp_bias": true"#),
        config(
            "Qwen2",
            r#", "tie_word_embeddings": true,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}"#,
        ),
        config("Qwen3", ""),
        config("Mistral", r#", "sliding_window": null"#),
        // Tensors with the rows of several projections.
        config("Phi3", ""),
        config("Mistral", r#", "sliding_window": 13"#),
        config("Phi3", r#", "sliding_window": 40, "partial_rotary_factor": 0.75"#),
        config("Mixtral", r#", "num_local_experts": 5"#),
        config(
            "Qwen3Moe",
            r#", "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 36,
                "norm_topk_prob": false, "mlp_only_layers": [1]"#,
        ),
        config(
            "Gemma2",
            r#", "sliding_window": 21, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 10.0"#,
        ),
        config(
            "Gemma3",
            r#", "sliding_window": 30, "sliding_window_pattern": 2, "query_pre_attn_scalar": 40"#,
        ),
    ]
}

fn on_software(
    config: &ModelConfig,
    change: impl FnOnce(&mut DeviceOptions),
) -> CudaExecutor<SoftwareDevice> {
    let mut options = DeviceOptions {
        pool_size: PoolSize::Blocks(64),
        block_tokens: 8,
        element: Element::F32,
        max_rows: 200,
        max_sequences: 12,
        max_positions: 160,
        mirror: Some(Region::allocate),
    };
    change(&mut options);
    let device = SoftwareDevice::new(64 << 20, options.element, config.head_dim);
    CudaExecutor::load(device, &Weights::random(5), config, &options, &mut |_| ()).unwrap()
}

fn on_cpu(config: &ModelConfig) -> CpuExecutor {
    let options = CpuOptions { blocks: 64, block_tokens: 8, threads: 2, ..CpuOptions::default() };
    CpuExecutor::with_weights(&Weights::random(5), config, &options, &mut |_| ()).unwrap()
}

fn tokens(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 7 + seed * 13 + i * i) % VOCAB).collect()
}

fn blocks(first: u32, count: u32) -> Vec<BlockId> {
    (0..count).rev().map(|i| BlockId(first + i)).collect()
}

fn far(a: &Logits, b: &Logits) -> f32 {
    assert_eq!((a.vocab, a.values.len()), (b.vocab, b.values.len()));
    a.values
        .iter()
        .zip(&b.values)
        .fold(0.0, |far, (a, b)| if (a - b).abs() <= far { far } else { (a - b).abs() })
}

/// A step of one sequence, with the logits of its last token.
fn step<'a>(tokens: &'a [u32], start: usize, block_table: &'a [BlockId]) -> SeqStep<'a> {
    SeqStep { tokens, start, block_table, logits: LogitsRequest::Last, adapter: None }
}

/// One sequence of a script.
struct SequenceScript {
    tokens: Vec<u32>,
    table: Vec<BlockId>,
    /// Lengths of its chunks; single tokens afterwards.
    chunks: Vec<usize>,
    begins_at: usize,
}

/// Runs sequences that begin at different steps, in chunks and then token by token, and calls `each` with every step.
fn run(scripts: &[SequenceScript], steps: usize, mut each: impl FnMut(&[SeqStep<'_>])) {
    let mut done = vec![0; scripts.len()];
    for step in 0..steps {
        let mut batch = Vec::new();
        for (script, done) in scripts.iter().zip(&mut done) {
            let Some(turn) = step.checked_sub(script.begins_at) else { continue };
            let count = script.chunks.get(turn).copied().unwrap_or(1).min(script.tokens.len() - *done);
            if count == 0 {
                continue;
            }
            let logits = match turn % 3 {
                0 if count > 1 => LogitsRequest::All,
                1 if count > 1 => LogitsRequest::No,
                _ => LogitsRequest::Last,
            };
            let tokens = &script.tokens[*done..*done + count];
            batch.push(SeqStep { tokens, start: *done, block_table: &script.table, logits, adapter: None });
            *done += count;
        }
        each(&batch);
    }
}

fn scripts() -> Vec<SequenceScript> {
    let script = |seed: u32, length: usize, first: u32, chunks: &[usize], begins_at| SequenceScript {
        tokens: tokens(seed, length),
        table: blocks(first, length.div_ceil(8) as u32),
        chunks: chunks.to_vec(),
        begins_at,
    };
    vec![
        script(1, 120, 3, &[100, 1, 1, 5], 0),
        script(2, 12, 20, &[3], 0),
        script(3, 40, 25, &[17, 9, 2], 1),
        script(4, 30, 40, &[1], 2),
        script(5, 25, 50, &[20], 3),
    ]
}

#[test]
fn ragged_steps_chunks_and_buckets_match_the_cpus_logits() {
    for config in families() {
        let (mut device, mut cpu) = (on_software(&config, |_| ()), on_cpu(&config));
        let (mut ours, mut theirs) = (Logits::default(), Logits::default());
        let mut rows = 0;
        run(&scripts(), 30, |batch| {
            device.execute(batch, &mut ours).unwrap();
            cpu.execute(batch, &mut theirs).unwrap();
            let far = far(&ours, &theirs);
            assert!(far < FAR, "{}: {far} after {rows} rows", config.spec.architecture);
            rows += ours.rows();
        });
        assert!(rows > 200, "{rows}");
        assert!(device.device().replays > 10, "decode steps are graphs: {}", device.device().replays);
    }
}

#[test]
fn more_rows_with_experts_than_are_computed_at_a_time_match_the_cpus_logits() {
    // 64 experts for each of 150 rows; 8192 pairs are computed at a time.
    let config = config("Mixtral", r#", "num_local_experts": 70, "num_experts_per_tok": 64"#);
    let (mut device, mut cpu) = (on_software(&config, |_| ()), on_cpu(&config));
    let (text, table) = (tokens(6, 150), blocks(3, 19));
    let all = SeqStep { logits: LogitsRequest::All, ..step(&text, 0, &table) };
    let (mut ours, mut theirs) = (Logits::default(), Logits::default());
    device.execute(std::slice::from_ref(&all), &mut ours).unwrap();
    cpu.execute(&[all], &mut theirs).unwrap();
    let far = far(&ours, &theirs);
    assert!(ours.rows() == 150 && far < FAR, "{far}");
}

#[test]
fn a_step_makes_one_copy_to_the_device_and_one_to_the_host() {
    let config = config("Llama", "");
    let mut device = on_software(&config, |_| ());
    let (mut logits, mut last) = (Logits::default(), device.device().copies);
    run(&scripts(), 12, |batch| {
        device.execute(batch, &mut logits).unwrap();
        let back = u64::from(logits.rows() > 0);
        // Only checks want more rows than a bucket; those results are copied in several pieces.
        if logits.rows() <= 16 {
            assert_eq!(device.device().copies - last, 1 + back, "{} rows", logits.rows());
        }
        last = device.device().copies;
    });
}

#[test]
fn another_executor_decodes_from_published_blocks() {
    let config = config("Qwen2", "");
    let (mut producer, mut consumer) = (on_software(&config, |_| ()), on_software(&config, |_| ()));
    let (text, table, there) = (tokens(9, 45), blocks(3, 6), blocks(30, 6));
    let mut logits = Logits::default();
    producer.execute(&[step(&text[..40], 0, &table)], &mut logits).unwrap();
    let before = producer.regions()[0].read_block(table[0]);
    assert!(before.iter().all(|byte| *byte == 0), "no block is copied before its publication");
    producer.publish(&table).unwrap();
    let copies = producer.device().copies;
    producer.publish(&table).unwrap();
    assert_eq!(producer.device().copies, copies, "a block is copied once");

    consumer.reserve(&there);
    for (from, to) in table.iter().zip(&there) {
        consumer.regions()[0].write_block(*to, &producer.regions()[0].read_block(*from));
    }
    let mut theirs = Logits::default();
    for at in 40..45 {
        producer.execute(&[step(&text[at..=at], at, &table)], &mut logits).unwrap();
        consumer.execute(&[step(&text[at..=at], at, &there)], &mut theirs).unwrap();
        assert_eq!(logits.values, theirs.values, "at {at}");
    }
    // Blocks that the consumer has computed since then can be leased again, byte for byte.
    producer.publish(&table).unwrap();
    consumer.publish(&there).unwrap();
    for (from, to) in table.iter().zip(&there) {
        assert!(producer.regions()[0].read_block(*from) == consumer.regions()[0].read_block(*to), "{from:?}");
    }
}

#[test]
fn a_storing_thread_copies_blocks_while_steps_run() {
    let config = config("Llama", "");
    let (mut published, mut stored) = (on_software(&config, |_| ()), on_software(&config, |_| ()));
    let (text, table) = (tokens(4, 60), blocks(3, 8));
    let (mut logits, mut theirs) = (Logits::default(), Logits::default());
    published.execute(&[step(&text[..56], 0, &table)], &mut logits).unwrap();
    stored.execute(&[step(&text[..56], 0, &table)], &mut theirs).unwrap();
    let full = &table[..7];
    published.publish(full).unwrap();
    let waits = Arc::clone(&stored.device().waits);
    let (copies, before) = (stored.device().copies, waits.load(Ordering::Acquire));
    full.iter().for_each(|block| stored.store(&[*block]).unwrap());
    assert_eq!((stored.device().copies, waits.load(Ordering::Acquire)), (copies, before));
    let shared_kv_pool = stored.shared_pool().expect("the device has a shared pool");
    let slots = Region::allocate(40, shared_kv_pool.region().block_bytes());
    let slot = |block: &BlockId| BlockId(39 - block.0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            full.iter().for_each(|block| shared_kv_pool.store(*block, &slots, slot(block)).unwrap())
        });
        // Both continue in the block after the stored ones.
        for at in 56..60 {
            published.execute(&[step(&text[at..=at], at, &table)], &mut logits).unwrap();
            stored.execute(&[step(&text[at..=at], at, &table)], &mut theirs).unwrap();
            assert_eq!(logits.values, theirs.values, "at {at}");
        }
    });
    assert_eq!(waits.load(Ordering::Acquire), before + 4, "one wait for each step");
    for block in full {
        let (ours, wanted) = (slots.read_block(slot(block)), published.regions()[0].read_block(*block));
        assert!(ours == wanted && ours.iter().any(|byte| *byte != 0), "{block:?}");
    }
    // The blocks are loaded into others. The step that reads those copies only its inputs and logits.
    let elsewhere = blocks(20, 8);
    for (there, here) in elsewhere[..7].iter().zip(full) {
        stored.reserve(&[*there]);
        shared_kv_pool.load(&slots, slot(here), *there).unwrap();
    }
    let copies = stored.device().copies;
    published.execute(&[step(&text[56..], 56, &table)], &mut logits).unwrap();
    stored.execute(&[step(&text[56..], 56, &elsewhere)], &mut theirs).unwrap();
    assert_eq!(logits.values, theirs.values);
    assert_eq!((stored.device().copies - copies, waits.load(Ordering::Acquire)), (2, before + 5));
    // A publication copies loaded blocks to the mirror, like computed blocks.
    stored.publish(&elsewhere[..7]).unwrap();
    for (there, here) in elsewhere[..7].iter().zip(full) {
        assert!(stored.regions()[0].read_block(*there) == slots.read_block(slot(here)));
    }
}

#[test]
fn a_step_does_not_upload_blocks_that_were_uploaded_on_landing() {
    let config = config("Qwen2", "");
    let (text, table, others) = (tokens(9, 33), blocks(3, 5), blocks(30, 1));
    let (mut logits, mut theirs) = (Logits::default(), Logits::default());
    let mut producer = on_software(&config, |_| ());
    producer.execute(&[step(&text[..32], 0, &table)], &mut logits).unwrap();
    producer.publish(&table).unwrap();
    producer.execute(&[step(&text[32..], 32, &table)], &mut logits).unwrap();
    for uploaded in [0, 2, 4] {
        let mut consumer = on_software(&config, |_| ());
        consumer.reserve(&table[..4]);
        for block in &table[..4] {
            consumer.regions()[0].write_block(*block, &producer.regions()[0].read_block(*block));
        }
        let shared_kv_pool = consumer.shared_pool().expect("the device has a shared pool");
        // Steps of other sequences run meanwhile and are not affected.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                table[..uploaded].iter().for_each(|block| shared_kv_pool.upload(&[*block]).unwrap())
            });
            consumer.execute(&[step(&text[..8], 0, &others)], &mut theirs).unwrap();
        });
        let before = consumer.device().copies;
        consumer.execute(&[step(&text[32..], 32, &table)], &mut theirs).unwrap();
        assert_eq!(consumer.device().copies - before, 2 + 4 - uploaded as u64, "inputs, logits, blocks");
        assert_eq!(logits.values, theirs.values);
        // Bytes of a failed read are not uploaded for sequences that compute the blocks again.
        consumer.reserve(&others);
        let before = consumer.device().copies;
        consumer.execute(&[step(&text[..8], 0, &others)], &mut theirs).unwrap();
        assert_eq!(consumer.device().copies - before, 2);
        let mut again = Logits::default();
        consumer.execute(&[step(&text[..8], 0, &table)], &mut again).unwrap();
        assert_eq!(again.values, theirs.values);
    }
}

#[test]
fn bf16_logits_stay_near_f32_logits() {
    let config = config("Llama", "");
    let mut exact = on_software(&config, |_| ());
    let mut coarse = on_software(&config, |options| options.element = Element::Bf16);
    assert_eq!(coarse.layout().block_bytes() * 2, exact.layout().block_bytes());
    let (mut a, mut b) = (Logits::default(), Logits::default());
    run(&scripts(), 12, |batch| {
        exact.execute(batch, &mut a).unwrap();
        coarse.execute(batch, &mut b).unwrap();
        let far = far(&a, &b);
        assert!(far > 0.0 && far < 0.3, "{far}");
    });
}

#[test]
fn a_pool_larger_than_device_memory_is_a_memory_error() {
    let config = config("Llama", "");
    let options = DeviceOptions {
        pool_size: PoolSize::Blocks(1 << 12),
        block_tokens: 16,
        element: Element::F32,
        max_rows: 64,
        max_sequences: 4,
        max_positions: 64,
        mirror: Some(Region::allocate),
    };
    let device = SoftwareDevice::new(8 << 20, Element::F32, config.head_dim);
    let loaded = CudaExecutor::load(device, &Weights::random(5), &config, &options, &mut |_| ());
    let Err(error) = loaded else { panic!("a pool of 96 MiB on a device of 8 MiB") };
    assert!(matches!(error, LoadError::Device(DeviceError::Memory { .. })), "{error}");
}

#[test]
fn a_pool_share_leaves_room_for_weights_buffers_and_the_reserve() {
    let config = config("Llama", "");
    let blocks = |share| {
        let mut device = on_software(&config, |options| options.pool_size = PoolSize::Share(share));
        let (table, mut logits) = ([BlockId(device.blocks() as u32 - 1)], Logits::default());
        device.execute(&[step(&[7], 0, &table)], &mut logits).unwrap();
        (device.blocks(), device.layout().block_bytes(), device.device().free_bytes().unwrap())
    };
    let (half, bytes, _) = blocks(0.5);
    let (whole, _, free) = blocks(1.0);
    // 64 MiB, an eighth of it reserved.
    assert!((whole - half).abs_diff((32 << 20) / bytes) <= 1, "{half} and {whole} blocks of {bytes} bytes");
    assert!(free.abs_diff(8 << 20) < (1 << 20), "{free} bytes are free");
}

#[test]
fn a_warm_executor_records_no_graphs_and_returns_equal_results() {
    let config = config("Qwen3", "");
    let (table, mut cold, mut warm) =
        (blocks(0, 4), on_software(&config, |_| ()), on_software(&config, |_| ()));
    warm.warm_up().unwrap();
    // Buckets up to 16, each with and without draws.
    assert_eq!(warm.device().graphs(), 2 * 5);
    let place = TokenPosition { position: 0, generated: 0 };
    let draw = Draw::of(&SamplingParams::default(), place).unwrap();
    let recorded = warm.device().replays;
    for (start, wanted) in
        [(0, LogitsRequest::Last), (1, LogitsRequest::Draw(draw)), (2, LogitsRequest::Last)]
    {
        let one = SeqStep { logits: wanted, ..step(&[7], start, &table) };
        let (mut a, mut b) = (Logits::default(), Logits::default());
        cold.execute(std::slice::from_ref(&one), &mut a).unwrap();
        warm.execute(&[one], &mut b).unwrap();
        assert_eq!((a.values, a.chosen), (b.values, b.chosen));
    }
    assert_eq!((warm.device().replays - recorded, warm.device().graphs()), (3, 2 * 5));
}

#[test]
fn a_token_outside_the_vocabulary_is_an_error_and_the_next_step_runs() {
    let config = config("Llama", "");
    let (mut device, table, mut logits) = (on_software(&config, |_| ()), blocks(0, 2), Logits::default());
    let error = device.execute(&[step(&[VOCAB], 0, &table)], &mut logits).unwrap_err().to_string();
    assert!(error.contains("vocabulary"), "{error}");
    device.execute(&[step(&[1], 0, &table)], &mut logits).unwrap();
    assert_eq!(logits.rows(), 1);
}

#[test]
fn a_write_to_a_block_that_another_sequence_reads_is_rejected_before_any_launch() {
    let config = config("Llama", "");
    let (mut device, mut logits) = (on_software(&config, |_| ()), Logits::default());
    let (table, prompt) = (blocks(0, 3), tokens(3, 20));
    let other = [table[0], BlockId(30), BlockId(31)];
    device.execute(&[step(&prompt[..8], 0, &table)], &mut logits).unwrap();
    // Both sequences continue from the block that the previous step has written.
    device.execute(&[step(&prompt[8..], 8, &table), step(&prompt[8..], 8, &other)], &mut logits).unwrap();
    let before = (device.device().launches, device.device().copies);
    let wrong = [step(&prompt[7..8], 7, &table), step(&prompt[8..], 8, &other)];
    let error = device.execute(&wrong, &mut logits).unwrap_err().to_string();
    assert!(error.contains("block 2 is written by one sequence and read by another"), "{error}");
    assert_eq!((device.device().launches, device.device().copies), before);
    device.execute(&[step(&prompt[7..8], 7, &table)], &mut logits).unwrap();
}

#[test]
fn steps_and_copies_of_blocks_use_streams_of_their_priority() {
    let mut device = on_software(&config("Llama", ""), |_| ());
    let (table, mut logits) = (blocks(0, 1), Logits::default());
    let before = device.device().work(Priority::Copies);
    device.execute(&[step(&[1, 2], 0, &table)], &mut logits).unwrap();
    assert_eq!(device.device().work(Priority::Copies), before);
    let steps = device.device().work(Priority::Steps);
    device.publish(&table).unwrap();
    assert!(device.device().work(Priority::Copies) > before);
    assert_eq!(device.device().work(Priority::Steps), steps);
}

#[test]
fn publish_skips_a_block_in_download_without_waiting() {
    let config = config("Llama", "");
    let (mut device, mut logits) = (on_software(&config, |_| ()), Logits::default());
    let ((arrived, has_begun), (go, passes)) = (sync_channel(0), sync_channel(0));
    device.device().hold_copies(CopyGate { arrived, passes: Mutex::new(passes) });
    let shared_kv_pool = device.shared_pool().expect("the device has a shared pool");
    let (table, prompt) = (blocks(0, 2), tokens(3, 16));
    device.execute(&[step(&prompt, 0, &table)], &mut logits).unwrap();
    device.mark_leased(&table[..1]).unwrap();
    std::thread::scope(|scope| {
        // Dropped when an assertion fails, so that no thread waits for it.
        let go = go;
        scope.spawn(|| shared_kv_pool.download(&table[..1]));
        has_begun.recv().unwrap();
        // The lease has ended past its drain deadline, and the block belongs to another prompt.
        device.execute(&[step(&prompt, 0, &table)], &mut logits).unwrap();
        assert_eq!(device.publish(&table).unwrap(), table[1..]);
        go.send(()).unwrap();
    });
    assert_eq!(device.publish(&table).unwrap(), table);
}
