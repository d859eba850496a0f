//! Bitwise checks of the executor's invariance: a row depends on nothing but its own sequence.

use baton_connector::BlockId;

use super::*;
use crate::compute::LogitsRequest;
use crate::model::config::AttentionConfig;
use crate::model::generation::GenerationDefaults;
use crate::model::lora::AdapterIndex;
use crate::model::lora::tests::{adapter_of, adapter_of_some};
use crate::model::weights::Weights;

fn config(family: &str) -> ModelConfig {
    // One head width that fits vectors and one that does not.
    let head_dim = if family == "Llama" { 32 } else { 24 };
    // One family has every bias.
    let bias = family == "Llama";
    let text = format!(
        r#"{{"architectures": ["{family}ForCausalLM"], "attention_bias": {bias}, "mlp_bias": {bias}, "hidden_size": 72, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": {head_dim}, "intermediate_size": 100,
            "vocab_size": 150, "eos_token_id": 1 }}"#
    );
    ModelConfig::parse(text.as_bytes(), GenerationDefaults::default()).unwrap()
}

/// One model of each family whose layers differ from Llama's, with windows and soft caps that change the result.
fn unlike_llama() -> Vec<(&'static str, ModelConfig)> {
    let of = |architecture: &'static str, more: &str| {
        let text = format!(
            r#"{{"architectures": ["{architecture}ForCausalLM"], "hidden_size": 72, "num_hidden_layers": 3,
                "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 100,
                "vocab_size": 150, "eos_token_id": 1 {more} }}"#
        );
        (architecture, ModelConfig::parse(text.as_bytes(), GenerationDefaults::default()).unwrap())
    };
    vec![
        of("Mistral", r#", "sliding_window": 13"#),
        of("Phi3", r#", "partial_rotary_factor": 0.75, "sliding_window": 33"#),
        of(
            "Gemma2",
            r#", "sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5,
                "final_logit_softcapping": 2.0"#,
        ),
        of("Gemma3", r#", "sliding_window": 40, "sliding_window_pattern": 2"#),
        of(
            "Qwen3Moe",
            r#", "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 44, "norm_topk_prob": true,
                "mlp_only_layers": [1]"#,
        ),
        of("Mixtral", r#", "num_local_experts": 4, "num_experts_per_tok": 2"#),
        of("GptOss", r#", "sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 3"#),
    ]
}

fn executor(config: &ModelConfig, change: impl FnOnce(&mut CpuOptions)) -> CpuExecutor {
    let mut options = CpuOptions { blocks: 64, block_tokens: 8, threads: 2, ..CpuOptions::default() };
    change(&mut options);
    CpuExecutor::with_weights(&Weights::random(5), config, &options, &mut |_| ()).unwrap()
}

fn tokens(seed: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 7 + seed * 13 + i * i) % 150).collect()
}

fn blocks(first: u32, count: u32) -> Vec<BlockId> {
    // Not in order: the order of blocks is arbitrary.
    (0..count).rev().map(|i| BlockId(first + i)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Logits of every position of `prompt`, computed in chunks of the given sizes.
fn in_chunks(executor: &mut CpuExecutor, prompt: &[u32], chunk: usize) -> Vec<u32> {
    in_chunks_by(executor, prompt, chunk, None)
}

/// As [`in_chunks`], with an adapter.
fn in_chunks_by(
    executor: &mut CpuExecutor,
    prompt: &[u32],
    chunk: usize,
    adapter: Option<AdapterIndex>,
) -> Vec<u32> {
    let table = blocks(3, prompt.len().div_ceil(executor.layout().block_tokens) as u32);
    let (mut all, mut logits) = (Vec::new(), Logits::default());
    for (i, tokens) in prompt.chunks(chunk).enumerate() {
        let step =
            SeqStep { tokens, start: i * chunk, block_table: &table, logits: LogitsRequest::All, adapter };
        executor.execute(&[step], &mut logits).unwrap();
        all.extend(bits(&logits.values));
    }
    all
}

#[test]
fn chunks_threads_blocks_and_instruction_sets_change_no_bit() {
    let prompt = tokens(1, 61);
    for family in ["Llama", "Qwen3"] {
        let config = config(family);
        let whole = in_chunks(&mut executor(&config, |_| ()), &prompt, 61);
        assert!(whole.iter().all(|bits| f32::from_bits(*bits).is_finite()));
        for chunk in [1, 7, 16, 40] {
            let chunked = in_chunks(&mut executor(&config, |_| ()), &prompt, chunk);
            assert!(chunked == whole, "{family} in chunks of {chunk}");
        }
        for threads in [1, 3] {
            let other = in_chunks(&mut executor(&config, |options| options.threads = threads), &prompt, 20);
            assert!(other == whole, "{family} on {threads} threads");
        }
        for block_tokens in [3, 16, 32] {
            let other =
                in_chunks(&mut executor(&config, |options| options.block_tokens = block_tokens), &prompt, 20);
            assert!(other == whole, "{family} in blocks of {block_tokens}");
        }
        for (kv_ranks, block_tokens) in [(1, 32), (2, 8), (2, 16)] {
            let change = |options: &mut CpuOptions| {
                (options.kv_ranks, options.block_tokens) = (kv_ranks, block_tokens);
            };
            let other = in_chunks(&mut executor(&config, change), &prompt, 20);
            assert!(other == whole, "{family} in {kv_ranks} ranks and blocks of {block_tokens}");
        }
        for isa in Isa::available() {
            let other = in_chunks(&mut executor(&config, |options| options.isa = isa), &prompt, 20);
            assert!(other == whole, "{family} on {isa:?}");
        }
    }
}

#[test]
fn windows_caps_and_experts_change_no_bit_in_any_mode() {
    // More rows than one block of rows of a product, for experts too.
    let prompt = tokens(3, 70);
    for (family, config) in unlike_llama() {
        let exact = keeps_its_bits(family, &config, &prompt, |_| ());
        assert!(exact.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{family}");
        let ranks = in_chunks(&mut executor(&config, |options| options.kv_ranks = 2), &prompt, 20);
        assert!(ranks == exact, "{family} in 2 ranks");
        let int8 = |options: &mut CpuOptions| options.weights = WeightMode::Int8;
        keeps_its_bits(&format!("{family}, int8"), &config, &prompt, int8);
        for mode in [WeightMode::Integers8, WeightMode::Integers4] {
            let change = |options: &mut CpuOptions| options.weights = mode;
            keeps_its_bits(&format!("{family}, {mode:?}"), &config, &prompt, change);
        }
        let mut before = None;
        for unit in Bf16Unit::available() {
            let change = |options: &mut CpuOptions| {
                (options.weights, options.bf16_unit) = (WeightMode::Bf16, unit);
                options.kv_dtype = KvDtype::Bf16;
            };
            let whole = keeps_its_bits(&format!("{family}, {unit:?}"), &config, &prompt, change);
            assert!(
                before.as_ref().is_none_or(|before| *before == whole),
                "{family}: {unit:?} is unlike others"
            );
            before = Some(whole);
        }
    }
}

#[test]
fn embeddings_are_multiplied_by_the_root_in_their_own_type() {
    // The root of 72 is 8.4853, and 8.5 in the bf16 of the weights.
    for (architecture, config) in unlike_llama() {
        let wanted = architecture.starts_with("Gemma").then_some(8.5);
        assert_eq!(executor(&config, |_| ()).network.embedding_scale, wanted, "{architecture}");
    }
}

#[test]
fn a_window_hides_the_keys_before_it() {
    let (_, config) = unlike_llama().swap_remove(0);
    let wide = ModelConfig {
        attention: AttentionConfig { windows: vec![None; 3], ..config.attention.clone() },
        ..config.clone()
    };
    let prompt = tokens(5, 40);
    let [narrow, wide] = [config, wide].map(|config| in_chunks(&mut executor(&config, |_| ()), &prompt, 40));
    let vocab = narrow.len() / 40;
    // Up to the thirteenth position a window of 13 contains every key.
    assert!(narrow[..13 * vocab] == wide[..13 * vocab]);
    assert!((13..40).all(|row| narrow[row * vocab..][..vocab] != wide[row * vocab..][..vocab]));
}

fn furthest(some: &[u32], others: &[u32]) -> f32 {
    let differences = some.iter().zip(others).map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs());
    differences.fold(0.0, f32::max)
}

/// The same bits with other chunks, blocks, threads and instruction sets.
fn keeps_its_bits(
    name: &str,
    config: &ModelConfig,
    prompt: &[u32],
    change: impl Fn(&mut CpuOptions),
) -> Vec<u32> {
    let whole = in_chunks(&mut executor(config, &change), prompt, prompt.len());
    for (chunk, block_tokens, threads) in [(1, 8, 2), (4, 16, 1), (40, 3, 3)] {
        for isa in Isa::available() {
            let other = |options: &mut CpuOptions| {
                change(options);
                (options.block_tokens, options.threads, options.isa) = (block_tokens, threads, isa);
            };
            let other = in_chunks(&mut executor(config, other), prompt, chunk);
            assert!(other == whole, "{name}, chunks of {chunk}, blocks of {block_tokens}, {isa:?}");
        }
    }
    whole
}

#[test]
fn sixteen_bit_caches_are_exact_about_chunks_too() {
    let prompt = tokens(2, 61);
    for family in ["Llama", "Qwen3"] {
        let config = config(family);
        let exact = in_chunks(&mut executor(&config, |_| ()), &prompt, 45);
        for dtype in [KvDtype::F16, KvDtype::Bf16] {
            let name = format!("{family}, {dtype:?}");
            let whole = keeps_its_bits(&name, &config, &prompt, |options| options.kv_dtype = dtype);
            let far = furthest(&whole, &exact);
            assert!(far > 0.0 && far < 0.1, "{name} moves logits by {far}");
        }
    }
}

#[test]
fn quantized_weights_are_exact_about_chunks_too() {
    let prompt = tokens(4, 50);
    for family in ["Llama", "Qwen3"] {
        let config = config(family);
        let exact = in_chunks(&mut executor(&config, |_| ()), &prompt, 50);
        let whole = keeps_its_bits(family, &config, &prompt, |options| options.weights = WeightMode::Int8);
        let far = furthest(&whole, &exact);
        assert!(far > 0.0 && far < 0.1, "{family}: int8 moves logits by {far}");
    }
}

#[test]
fn products_with_integers_are_exact_about_chunks_too() {
    let prompt = tokens(4, 50);
    for family in ["Llama", "Qwen3"] {
        let config = config(family);
        let exact = in_chunks(&mut executor(&config, |_| ()), &prompt, 50);
        for (mode, bound) in [(WeightMode::Integers8, 0.3), (WeightMode::Integers4, 3.0)] {
            let name = format!("{family}, {mode:?}");
            let whole = keeps_its_bits(&name, &config, &prompt, |options| options.weights = mode);
            let far = furthest(&whole, &exact);
            assert!(far > 0.0 && far < bound, "{name} moves logits by {far}");
        }
        // Without a matrix of integers nothing is rounded.
        let stored =
            keeps_its_bits(family, &config, &prompt, |options| options.weights = WeightMode::Integers);
        assert!(stored == exact, "{family}");
    }
}

#[test]
fn products_in_bfloat16_are_exact_about_chunks_and_units_too() {
    let prompt = tokens(6, 61);
    for family in ["Llama", "Qwen3"] {
        let config = config(family);
        let exact = in_chunks(&mut executor(&config, |_| ()), &prompt, 61);
        let mut before = None;
        for unit in Bf16Unit::available() {
            let change =
                |options: &mut CpuOptions| (options.weights, options.bf16_unit) = (WeightMode::Bf16, unit);
            let whole = keeps_its_bits(&format!("{family} {unit:?}"), &config, &prompt, change);
            let far = furthest(&whole, &exact);
            assert!(far > 0.0 && far < 0.1, "{family} {unit:?}: bfloat16 moves logits by {far}");
            assert!(
                before.as_ref().is_none_or(|before| *before == whole),
                "{family}: {unit:?} is unlike others"
            );
            before = Some(whole);
        }
    }
}

#[test]
fn long_contexts_in_bfloat16_are_exact_about_chunks_and_units_too() {
    let prompt = tokens(8, 300);
    let config = config("Qwen3");
    for kv_dtype in [KvDtype::F32, KvDtype::Bf16] {
        let run = |unit: Bf16Unit, isa: Isa, chunk: usize| {
            let change = |options: &mut CpuOptions| {
                (options.weights, options.bf16_unit) = (WeightMode::Bf16, unit);
                (options.isa, options.kv_dtype) = (isa, kv_dtype);
            };
            in_chunks(&mut executor(&config, change), &prompt, chunk)
        };
        let whole = run(Bf16Unit::detect(), Isa::detect(), prompt.len());
        for (unit, chunk) in
            Bf16Unit::available().into_iter().flat_map(|unit| [(unit, 300), (unit, 259), (unit, 7)])
        {
            assert!(run(unit, Isa::detect(), chunk) == whole, "{unit:?} in chunks of {chunk}, {kv_dtype:?}");
        }
        for isa in Isa::available() {
            assert!(run(Bf16Unit::Widened, isa, 70) == whole, "{isa:?}, {kv_dtype:?}");
        }
    }
}

#[test]
fn prefill_chunks_and_decode_rows_share_a_step_without_touching_each_other() {
    shares_a_step(&config("Qwen3"));
    unlike_llama().iter().for_each(|(_, config)| shares_a_step(config));
}

fn shares_a_step(config: &ModelConfig) {
    let (long, short) = (tokens(1, 50), tokens(9, 20));
    let alone = |prompt: &[u32]| in_chunks(&mut executor(config, |_| ()), prompt, prompt.len());
    let (long_alone, short_alone) = (alone(&long), alone(&short));
    let mut executor = executor(config, |_| ());
    let (long_table, short_table) = (blocks(10, 7), blocks(30, 3));
    let mut logits = Logits::default();
    let vocab = config.vocab;
    // The long prompt arrives in chunks of 10 while the short one is decoded token by token.
    for turn in 0..5 {
        let mut batch = Vec::new();
        if turn < short.len() {
            batch.push(SeqStep {
                tokens: &short[turn..=turn],
                start: turn,
                block_table: &short_table,
                logits: LogitsRequest::Last,
                adapter: None,
            });
        }
        batch.push(SeqStep {
            tokens: &long[turn * 10..(turn + 1) * 10],
            start: turn * 10,
            block_table: &long_table,
            logits: if turn == 4 { LogitsRequest::Last } else { LogitsRequest::No },
            adapter: None,
        });
        executor.execute(&batch, &mut logits).unwrap();
        assert_eq!(bits(logits.row(0)), short_alone[turn * vocab..][..vocab], "turn {turn}");
        if turn == 4 {
            assert_eq!(logits.rows(), 2);
            assert_eq!(bits(logits.row(1)), long_alone[49 * vocab..][..vocab]);
        } else {
            assert_eq!(logits.rows(), 1);
        }
    }
}

/// Two adapters of a model, of other ranks than those of an item.
fn two_adapters(config: &ModelConfig) -> Arc<[LoraAdapter]> {
    Arc::new([adapter_of(config, 1, 3), adapter_of(config, 2, 11)])
}

const FIRST: Option<AdapterIndex> = Some(AdapterIndex(0));
const SECOND: Option<AdapterIndex> = Some(AdapterIndex(1));

/// The bits of both adapters' rows with other chunks, threads and instruction sets. The model alone has those of an
/// executor without adapters.
fn adapters_keep_their_bits(name: &str, config: &ModelConfig, change: impl Fn(&mut CpuOptions)) -> Vec<u32> {
    let (prompt, adapters) = (tokens(3, 61), two_adapters(config));
    let with = |options: &mut CpuOptions| {
        change(options);
        options.adapters = Arc::clone(&adapters);
    };
    let alone = in_chunks(&mut executor(config, &change), &prompt, 61);
    assert!(in_chunks(&mut executor(config, with), &prompt, 61) == alone, "{name}: the model alone");
    let [first, second] =
        [FIRST, SECOND].map(|adapter| in_chunks_by(&mut executor(config, with), &prompt, 61, adapter));
    for (of, by) in [(&first, FIRST), (&second, SECOND)] {
        let far = furthest(of, &alone);
        assert!(far > 1e-3 && far.is_finite(), "{name}: {by:?} moves logits by {far}");
        for (chunk, threads, isa) in
            [(1, 2, Isa::detect()), (7, 1, Isa::Portable), (40, 3, Isa::detect()), (61, 1, Isa::Portable)]
        {
            let other = |options: &mut CpuOptions| {
                with(options);
                (options.threads, options.isa) = (threads, isa);
            };
            let other = in_chunks_by(&mut executor(config, other), &prompt, chunk, by);
            assert!(other == *of, "{name}: {by:?} in chunks of {chunk} on {isa:?}");
        }
    }
    assert!(furthest(&first, &second) > 1e-3, "{name}: both adapters are one");
    [first, second].concat()
}

#[test]
fn adapters_keep_their_bits_in_every_family_and_mode() {
    let like_llama = ["Llama", "Qwen3"].map(|family| (family, config(family)));
    for (family, config) in like_llama.into_iter().chain(unlike_llama()) {
        adapters_keep_their_bits(family, &config, |_| ());
        adapters_keep_their_bits(family, &config, |options| options.weights = WeightMode::Int8);
        adapters_keep_their_bits(family, &config, |options| options.weights = WeightMode::Integers4);
        let mut before: Option<Vec<u32>> = None;
        for unit in Bf16Unit::available() {
            let change =
                |options: &mut CpuOptions| (options.weights, options.bf16_unit) = (WeightMode::Bf16, unit);
            let bits = adapters_keep_their_bits(&format!("{family} {unit:?}"), &config, change);
            assert!(
                before.as_ref().is_none_or(|before| *before == bits),
                "{family}: {unit:?} is unlike others"
            );
            before = Some(bits);
        }
    }
}

#[test]
fn adapters_share_a_step_with_each_other_and_with_the_model_alone() {
    for (family, config) in [("Llama", config("Llama"))].into_iter().chain(unlike_llama()) {
        let adapters = two_adapters(&config);
        let with = |options: &mut CpuOptions| options.adapters = Arc::clone(&adapters);
        let sequences =
            [(FIRST, tokens(1, 30)), (None, tokens(1, 30)), (SECOND, tokens(1, 30)), (FIRST, tokens(9, 6))];
        let alone = sequences.each_ref().map(|(adapter, prompt)| {
            in_chunks_by(&mut executor(&config, with), prompt, prompt.len(), *adapter)
        });
        let mut executor = executor(&config, with);
        let tables = [0, 8, 16, 24].map(|first| blocks(first, 4));
        let mut found = [const { Vec::new() }; 4];
        let mut logits = Logits::default();
        // Chunks of 10 beside single tokens.
        for turn in 0..6 {
            let mut batch = Vec::new();
            let mut of = Vec::new();
            for (at, (adapter, prompt)) in sequences.iter().enumerate() {
                let (start, end) = if at == 3 { (turn, turn + 1) } else { (turn * 10, (turn + 1) * 10) };
                let Some(tokens) = prompt.get(start..end) else { continue };
                let (block_table, logits) = (tables[at].as_slice(), LogitsRequest::All);
                batch.push(SeqStep { tokens, start, block_table, logits, adapter: *adapter });
                of.extend(tokens.iter().map(|_| at));
            }
            executor.execute(&batch, &mut logits).unwrap();
            for (row, at) in of.into_iter().enumerate() {
                found[at].extend(bits(logits.row(row)));
            }
        }
        assert!(found == alone, "{family}");
    }
}

#[test]
fn a_projection_that_no_adapter_of_the_step_changes_costs_no_phase() {
    let config = config("Llama");
    let only = |name: &str| adapter_of_some(&config, 1, 4, |module| module.ends_with(name));
    let adapters: Arc<[LoraAdapter]> = Arc::new([only("layers.0.self_attn.q_proj"), only("down_proj")]);
    let mut executor = executor(&config, |options| options.adapters = adapters);
    let mut phases = |adapter| {
        in_chunks_by(&mut executor, &tokens(3, 20), 20, adapter);
        executor.threads.phases()
    };
    let alone = phases(None);
    // One projection of the first layer, and one of each of two layers.
    assert_eq!([FIRST, SECOND].map(phases), [alone + 1, alone + 2]);
}

#[test]
#[should_panic(expected = "an adapter of the executor")]
fn an_unknown_adapter_panics() {
    let table = blocks(0, 1);
    let (tokens, logits) = ([1], LogitsRequest::Last);
    let step = SeqStep { tokens: &tokens, start: 0, block_table: &table, logits, adapter: FIRST };
    drop(executor(&config("Llama"), |_| ()).execute(&[step], &mut Logits::default()));
}

#[test]
fn an_empty_batch_does_nothing() {
    let mut logits = Logits { vocab: 1, values: vec![1.0], ..Logits::default() };
    executor(&config("Llama"), |_| ()).execute(&[], &mut logits).unwrap();
    assert_eq!((logits.vocab, logits.rows()), (150, 0));
}

#[test]
fn the_callback_runs_in_every_phase_of_a_step() {
    let config = config("Llama");
    let mut executor = executor(&config, |options| options.threads = 1);
    let (mut looks, table) = (0, blocks(0, 1));
    let step =
        SeqStep { tokens: &[1], start: 0, block_table: &table, logits: LogitsRequest::Last, adapter: None };
    executor.run(&[step], &mut Logits::default(), &mut || looks += 1).unwrap();
    // Products of the layer's four matrices, rotation, attention, and the phase after a projection.
    assert!(looks >= 6 * config.layers, "{looks} looks in {} layers", config.layers);
}

#[test]
fn progress_ends_at_the_total() {
    let mut last = WeightLoadProgress { bytes_done: 0, bytes_total: 0 };
    let options = CpuOptions { blocks: 1, threads: 1, ..CpuOptions::default() };
    CpuExecutor::with_weights(&Weights::random(5), &config("Llama"), &options, &mut |now| {
        assert!(now.bytes_done > last.bytes_done);
        last = now;
    })
    .unwrap();
    assert_eq!(last.bytes_done, last.bytes_total);
}

#[test]
#[should_panic(expected = "block 3 is written by one sequence and read by another")]
fn a_step_that_writes_blocks_of_another_sequence_panics() {
    let mut executor = executor(&config("Qwen3"), |_| ());
    let (ours, theirs) = ([BlockId(3), BlockId(4)], [BlockId(3), BlockId(5)]);
    let step = |start, block_table| SeqStep {
        tokens: &[1],
        start,
        block_table,
        logits: LogitsRequest::Last,
        adapter: None,
    };
    // Blocks of eight tokens: one sequence writes the first block's last position, and the other continues after it.
    drop(executor.execute(&[step(7, &ours[..]), step(8, &theirs[..])], &mut Logits::default()));
}
